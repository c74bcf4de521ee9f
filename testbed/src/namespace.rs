//! One network namespace, by its name below `/run/netns`.

use crate::wait;
use anyhow::{Context as _, Result, bail, ensure};
use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

/// Where iproute2 keeps them.
pub(crate) const DIRECTORY: &str = "/run/netns";

pub(crate) fn path(name: &str) -> PathBuf {
    Path::new(DIRECTORY).join(name)
}

/// Does `work` inside, on a thread of its own. A socket that it opens stays inside, also after it is returned.
pub(crate) fn enter<T: Send>(name: &str, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let namespace = File::open(path(name)).with_context(|| format!("no network namespace {name}"))?;
    thread::scope(|scope| {
        let inside = scope.spawn(|| {
            setns(namespace, CloneFlags::CLONE_NEWNET).with_context(|| format!("cannot enter {name}"))?;
            work()
        });
        inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Sets what is below `/proc/sys/net`; a name is as in `ipv4/ip_forward`.
pub(crate) fn sysctls(name: &str, values: &[(&str, &str)]) -> Result<()> {
    enter(name, || {
        values.iter().try_for_each(|(key, value)| {
            fs::write(Path::new("/proc/sys/net").join(key), value)
                .with_context(|| format!("{name}: sysctl {key}={value}"))
        })
    })
}

/// Runs one program that reads its orders from standard input: `ip -batch -`, `iptables-restore`.
pub(crate) fn feed(command: &mut Command, orders: &str) -> Result<()> {
    let program = command.get_program().to_owned();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", program.display()))?;
    // Dropped at the end of the statement, which is the end of the input.
    child.stdin.take().context("no standard input")?.write_all(orders.as_bytes())?;
    let output = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{} failed: {}\n{orders}", program.display(), said.trim());
    Ok(())
}

/// Makes namespaces.
pub(crate) fn add<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<()> {
    let orders: String = names.into_iter().map(|name| format!("netns add {name}\n")).collect();
    feed(Command::new("ip").args(["-batch", "-"]), &orders)
}

/// Ends the processes inside and forgets the name; the kernel takes the devices down with it. One that is not there
/// is no error.
pub(crate) fn remove(name: &str) -> Result<()> {
    let path = path(name);
    let Ok(metadata) = fs::metadata(&path) else { return Ok(()) };
    end_processes(name, metadata.ino())?;
    match umount2(&path, MntFlags::MNT_DETACH) {
        // EINVAL: made but never mounted, or already unmounted by another thread.
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
        Err(error) => return Err(error).with_context(|| format!("cannot unmount {}", path.display())),
    }
    match fs::remove_file(&path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

fn end_processes(name: &str, inode: u64) -> Result<()> {
    wait::until(&format!("the end of all processes in {name}"), Duration::from_secs(5), || {
        let inside = processes(inode)?;
        for pid in &inside {
            match kill(*pid, Signal::SIGKILL) {
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(error) => bail!("cannot kill {pid}: {error}"),
            }
        }
        ensure!(inside.is_empty(), "{inside:?} still run");
        Ok(())
    })
}

/// The processes in the namespace with that inode; zombies are in none.
fn processes(inode: u64) -> Result<Vec<Pid>> {
    let ours = Pid::this();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()).map(Pid::from_raw)
        else {
            continue;
        };
        // A process may end while we look.
        let Ok(namespace) = fs::metadata(entry.path().join("ns/net")) else { continue };
        if namespace.ino() == inode && pid != ours {
            found.push(pid);
        }
    }
    Ok(found)
}
