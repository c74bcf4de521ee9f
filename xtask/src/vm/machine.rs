//! A machine: qemu with one kernel, watched over its serial lines until it has run its steps.

use super::image::Image;
use super::kernels::Kernel;
use super::payload::Payload;
use super::report::BOOT;
use super::steps::{Ending, Outcome, Step};
use crate::sh;
use anyhow::{Context as _, Result, bail, ensure};
use std::fs::{self, File};
use std::io::{BufWriter, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use testbed::{Process, wait};

const QEMU: &str = "qemu-system-x86_64";
/// From the start of qemu to the first line of `init`; a few seconds on an idle machine.
const BOOT_LIMIT: Duration = Duration::from_secs(120);
/// MiB. The archive is in memory twice while the kernel unpacks it.
const MEMORY: u32 = 2048;
/// How long to wait for news before looking at the clock.
const NEWS: Duration = Duration::from_secs(1);
/// Lines of the kernel's own console that are shown when it went wrong.
const SHOWN: usize = 40;

/// Files of one machine, below `target`.
struct Files {
    root: PathBuf,
    console: PathBuf,
    line: PathBuf,
    qemu: PathBuf,
}

/// Boots a kernel and runs the steps on it. What the steps print is kept in `target/vm/NAME/`.
///
/// # Errors
/// When qemu cannot be run. What goes wrong inside is an outcome.
pub(super) fn run(kernel: &Kernel, image: &Image, payload: &Payload, steps: &[Step]) -> Result<Vec<Outcome>> {
    let name = &kernel.name;
    let directory = super::directory().join(name);
    fs::create_dir_all(&directory)?;
    // Until it ends: two would write the same logs.
    let lock = File::create(directory.join("lock"))?;
    lock.try_lock().with_context(|| format!("another machine with Linux {name} runs"))?;
    let files = files(&directory)?;
    write_root(&files.root, image, payload, steps)?;
    let mut machine = Process::start(format!("Linux {name}"), qemu(image, &files), files.qemu.clone())?;
    let mut watch = Watch::begin(kernel, steps);
    let mut line = Line::open(&files.line)?;
    let verdict = loop {
        let silence = wait::until("news of the machine", NEWS, || {
            ensure!(line.read_more()? || !machine.is_running()?, "silence");
            Ok(())
        });
        while let Some(text) = line.next() {
            watch.hear(&text);
        }
        if watch.is_done() {
            break Ok(());
        }
        if silence.is_ok() && !machine.is_running()? && !line.read_more()? {
            break Err(anyhow::anyhow!("the machine ended: {}", fs::read_to_string(&files.qemu)?.trim()));
        }
        if let Err(error) = watch.check_time() {
            break Err(error);
        }
    };
    drop(machine);
    if let Err(error) = verdict {
        sh::say(&format!("{name}: {error:#}; the end of the kernel's console:"));
        eprintln!("{}", tail(&files.console));
        watch.fail(&error.to_string());
    }
    fs::remove_file(&files.root)?;
    Ok(watch.outcomes)
}

fn files(directory: &Path) -> Result<Files> {
    let files = Files {
        root: directory.join("root.cpio"),
        console: directory.join("console.log"),
        line: directory.join("steps.log"),
        qemu: directory.join("qemu.log"),
    };
    for log in [&files.console, &files.line, &files.qemu] {
        File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    }
    Ok(files)
}

fn write_root(root: &Path, image: &Image, payload: &Payload, steps: &[Step]) -> Result<()> {
    let mut out = BufWriter::new(File::create(root)?);
    image.write_base(&mut out)?;
    let list: String = steps.iter().map(|step| format!("{} {}\n", step.name, step.command)).collect();
    let modules = super::modules::NEEDED.join("\n");
    payload.write(&mut out, &[("/steps", list), ("/modules", modules)])?;
    Ok(out.flush()?)
}

/// Emulated: KVM is not there on every machine, and the outcome must not depend on it.
fn qemu(image: &Image, files: &Files) -> Command {
    let mut command = Command::new(QEMU);
    command
        .args(["-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", &MEMORY.to_string()])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .arg("-kernel")
        .arg(image.kernel())
        .arg("-initrd")
        .arg(&files.root)
        // A panic ends the machine at once.
        .args(["-append", "console=ttyS0 quiet panic=-1 oops=panic"])
        .arg("-serial")
        .arg(format!("file:{}", files.console.display()))
        .arg("-serial")
        .arg(format!("file:{}", files.line.display()));
    command
}

fn tail(file: &Path) -> String {
    let text = fs::read(file).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(SHOWN)..].join("\n")
}

/// A log that another program writes, by lines.
struct Line {
    file: File,
    rest: Vec<u8>,
}

impl Line {
    fn open(path: &Path) -> Result<Self> {
        Ok(Self { file: File::open(path)?, rest: Vec::new() })
    }

    /// Whether there was more.
    fn read_more(&mut self) -> Result<bool> {
        Ok(self.file.read_to_end(&mut self.rest)? > 0)
    }

    /// The next complete line.
    fn next(&mut self) -> Option<String> {
        let end = self.rest.iter().position(|byte| *byte == b'\n')?;
        let line: Vec<u8> = self.rest.drain(..=end).collect();
        Some(String::from_utf8_lossy(&line).trim_end().to_owned())
    }
}

/// What has been heard of a machine.
struct Watch<'a> {
    kernel: &'a Kernel,
    steps: &'a [Step],
    outcomes: Vec<Outcome>,
    /// What it is at: nothing between two steps.
    current: Option<&'a Step>,
    since: Instant,
    told: Instant,
    done: bool,
    lacks: Vec<String>,
}

impl<'a> Watch<'a> {
    fn begin(kernel: &'a Kernel, steps: &'a [Step]) -> Self {
        let now = Instant::now();
        Self {
            kernel,
            steps,
            outcomes: Vec::new(),
            current: None,
            since: now,
            told: now,
            done: false,
            lacks: Vec::new(),
        }
    }

    fn is_done(&self) -> bool {
        self.done
    }

    fn hear(&mut self, line: &str) {
        let Some(news) = line.strip_prefix("@@ ") else {
            if let Some(outcome) = self.current.and(self.outcomes.last_mut()) {
                outcome.hear(line);
            }
            return;
        };
        let words: Vec<_> = news.split(' ').collect();
        match words[..] {
            ["lacks", module] => self.lacks.push(module.to_owned()),
            ["up", release] => self.is_up(release),
            ["begin", step] => {
                self.current = self.steps.iter().find(|known| known.name == step);
                self.since = Instant::now();
                self.told = self.since;
                self.outcomes.push(Outcome::begun(step));
                sh::say(&format!("{}: {step}", self.kernel.name));
            }
            ["end", _, status] => self.end(if status == "0" { Ending::Passed } else { Ending::Failed }),
            ["done"] => self.done = true,
            _ => {}
        }
    }

    fn is_up(&mut self, release: &str) {
        sh::say(&format!("{}: Linux {release} is up", self.kernel.name));
        let mut boot = Outcome::begun(BOOT);
        let known = &self.kernel.lacks;
        let missing: Vec<_> = self.lacks.iter().filter(|module| !known.contains(*module)).collect();
        let there: Vec<_> = known.iter().filter(|module| !self.lacks.contains(*module)).collect();
        if !missing.is_empty() {
            boot.hear(&format!("missing, and xtask/kernels.yaml does not say so: {missing:?}"));
        }
        if !there.is_empty() {
            boot.hear(&format!(
                "xtask/kernels.yaml says that these are missing, and they are not: {there:?}"
            ));
        }
        let ending = if boot.output.is_empty() { Ending::Passed } else { Ending::Failed };
        self.outcomes.push(boot);
        self.end(ending);
    }

    fn end(&mut self, ending: Ending) {
        self.current = None;
        if let Some(outcome) = self.outcomes.last_mut() {
            outcome.end(ending, self.since.elapsed());
        }
        self.since = Instant::now();
    }

    /// # Errors
    /// When the machine takes too long for what it is at.
    fn check_time(&mut self) -> Result<()> {
        let (what, limit) = self.current.map_or((BOOT, BOOT_LIMIT), |step| (step.name, step.limit));
        if self.since.elapsed() > limit {
            bail!("{what} takes more than {} s", limit.as_secs());
        }
        if self.told.elapsed() > sh::TICK {
            self.told = Instant::now();
            let last = self.outcomes.last().and_then(|outcome| outcome.output.last());
            let last = last.map(|line| format!("; last: {line}")).unwrap_or_default();
            let seconds = self.since.elapsed().as_secs();
            sh::say(&format!("{}: {what} is still at it ({seconds} s){last}", self.kernel.name));
        }
        Ok(())
    }

    /// What it was at has failed; so have the steps that it never came to.
    fn fail(&mut self, why: &str) {
        if self.outcomes.is_empty() {
            self.outcomes.push(Outcome::begun(BOOT));
        }
        let open = self.outcomes.last().is_some_and(Outcome::is_open);
        if open {
            self.end(Ending::Failed);
        }
        if let Some(outcome) = self.outcomes.last_mut() {
            outcome.hear(why);
        }
    }
}
