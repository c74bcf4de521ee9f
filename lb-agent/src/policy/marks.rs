//! Marks: the numbers by which a node tells the holders on other nodes apart.

use lb_common::mark::{MAX_HOLDERS, next, preferred};
use std::collections::{BTreeMap, BTreeSet};

/// The marks of a fresh node: each name's preferred mark, probing upward past collisions in the order given.
///
/// At most [`MAX_HOLDERS`] names get one; the rest is left out.
pub fn assign<'a>(names: &[&'a str]) -> Vec<(&'a str, u8)> {
    assign_keeping(names, &BTreeMap::new(), &BTreeSet::new())
}

/// The marks on a node that has been running: a name in `already` keeps its mark, and nobody else gets a mark
/// that is `busy`, which means that flows of a holder that left still carry it.
///
/// Answers in the order of `names`, without those for which no mark is left.
pub fn assign_keeping<'a>(
    names: &[&'a str],
    already: &BTreeMap<String, u8>,
    busy: &BTreeSet<u8>,
) -> Vec<(&'a str, u8)> {
    let mut taken: BTreeSet<u8> = BTreeSet::new();
    let kept: Vec<Option<u8>> = names
        .iter()
        .map(|name| already.get(*name).copied().filter(|mark| is_mark(*mark) && taken.insert(*mark)))
        .collect();
    taken.extend(busy.iter().filter(|mark| is_mark(**mark)));
    let choose = |(name, kept): (&&'a str, Option<u8>)| {
        let mark = kept.or_else(|| first_free(name, &taken))?;
        taken.insert(mark);
        Some((*name, mark))
    };
    names.iter().zip(kept).filter_map(choose).collect()
}

fn first_free(name: &str, taken: &BTreeSet<u8>) -> Option<u8> {
    let probes = std::iter::successors(Some(preferred(name)), |mark| Some(next(*mark)));
    probes.take(usize::from(MAX_HOLDERS)).find(|mark| !taken.contains(mark))
}

/// What is read back from a map may be anything.
fn is_mark(mark: u8) -> bool {
    (1..=MAX_HOLDERS).contains(&mark)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three names that prefer one mark.
    fn colliding() -> [String; 3] {
        let mark = preferred("node-1");
        let mut names = (1..).map(|i| format!("node-{i}")).filter(|name| preferred(name) == mark);
        std::array::from_fn(|_| names.next().unwrap())
    }

    fn map(marks: &[(&str, u8)]) -> BTreeMap<String, u8> {
        marks.iter().map(|(name, mark)| ((*name).to_owned(), *mark)).collect()
    }

    #[test]
    fn a_holder_that_stays_keeps_its_mark_when_the_first_of_a_collision_leaves() {
        let names = colliding();
        let [a, b, c] = names.each_ref().map(String::as_str);
        let before = assign(&[a, b, c]);
        let after = assign_keeping(&[b, c], &map(&before), &BTreeSet::new());
        assert_eq!(after, before[1..]);
        assert_ne!(after, assign(&[b, c]), "a fresh node would move them");
    }

    #[test]
    fn a_freed_mark_is_not_given_away_while_flows_carry_it() {
        let names = colliding();
        let [a, b, _] = names.each_ref().map(String::as_str);
        let mark = preferred(a);
        assert_eq!(assign_keeping(&[b], &BTreeMap::new(), &BTreeSet::from([mark])), [(b, next(mark))]);
        assert_eq!(assign_keeping(&[b], &BTreeMap::new(), &BTreeSet::new()), [(b, mark)]);
    }

    #[test]
    fn a_newcomer_never_takes_a_mark_that_a_later_name_keeps() {
        let names = colliding();
        let [a, b, _] = names.each_ref().map(String::as_str);
        let mark = preferred(a);
        assert_eq!(
            assign_keeping(&[a, b], &map(&[(b, mark)]), &BTreeSet::new()),
            [(a, next(mark)), (b, mark)]
        );
    }

    #[test]
    fn what_cannot_be_a_mark_is_not_kept() {
        let already = map(&[("x", 0), ("y", 251), ("z", 7), ("zz", 7)]);
        let marks = assign_keeping(&["x", "y", "z", "zz"], &already, &BTreeSet::new());
        let distinct: BTreeSet<u8> = marks.iter().map(|(_, mark)| *mark).collect();
        assert_eq!((marks.len(), distinct.len()), (4, 4));
        assert!(distinct.iter().all(|mark| is_mark(*mark)));
        assert_eq!(marks[2], ("z", 7));
    }

    #[test]
    fn when_every_mark_is_busy_nobody_gets_one() {
        let busy: BTreeSet<u8> = (1..=MAX_HOLDERS).collect();
        assert_eq!(assign_keeping(&["a", "b"], &map(&[("b", 9)]), &busy), [("b", 9)]);
    }
}
