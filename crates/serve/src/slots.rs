//! Which conversation lies in which slot of the cache.

/// Beginnings shorter than this are not worth a copy.
const WORTH_COPYING: usize = 8;
/// Another prompt that is being computed is waited for only if it saves this much more than what is there.
const WORTH_WAITING: usize = 16;

#[derive(Debug, Clone, Default)]
struct Slot {
    /// The tokens whose keys and values the slot holds (or will hold, while pending).
    ids: Vec<i32>,
    /// A request is under way in it.
    busy: bool,
    /// Its prompt is not computed yet.
    pending: bool,
    /// When it was last taken.
    used: u64,
}

/// Where a prompt goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) slot: usize,
    /// How many of the prompt's tokens need not be computed.
    pub(crate) kept: usize,
    /// The slot they are copied from, where the slot itself does not hold them.
    pub(crate) copy_from: Option<usize>,
}

/// What to do with a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placement {
    Now(Place),
    /// Most of it is being computed for another request: ask again after that.
    AfterPending,
    /// Every slot is busy.
    Full,
}

/// The slots of a cache.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    clock: u64,
}

impl Slots {
    pub(crate) fn new(n: usize) -> Self {
        Self {
            slots: vec![Slot::default(); n],
            clock: 0,
        }
    }

    /// Where a prompt goes: into the slot that holds its conversation so far, else into the lowest empty slot, else into the one that
    /// was not used for the longest time. At least the last token is always left to compute.
    pub(crate) fn place(&self, prompt: &[i32]) -> Placement {
        let common = |slot: &Slot| {
            let same = slot
                .ids
                .iter()
                .zip(prompt)
                .take_while(|(a, b)| a == b)
                .count();
            same.min(prompt.len().saturating_sub(1))
        };
        let free = |slot: &&(usize, &Slot)| !slot.1.busy;
        let all = || self.slots.iter().enumerate();
        let best = |pending: bool| {
            all()
                .filter(|(_, slot)| slot.pending == pending)
                .map(|(i, slot)| (common(slot), std::cmp::Reverse(i)))
                .max()
                .map_or((0, 0), |(length, std::cmp::Reverse(i))| (length, i))
        };
        let own = all()
            .filter(|s| free(&s))
            .filter(|(_, slot)| !slot.ids.is_empty() && common(slot) + 1 >= slot.ids.len())
            .max_by_key(|(i, slot)| (slot.ids.len(), std::cmp::Reverse(*i)));
        let (ready, source) = best(false);
        if let Some((slot, held)) = own
            && common(held) + WORTH_COPYING > ready
        {
            return Placement::Now(Place {
                slot,
                kept: common(held),
                copy_from: None,
            });
        }
        if best(true).0 >= ready + WORTH_WAITING {
            return Placement::AfterPending;
        }
        let Some((slot, held)) = all()
            .filter(|s| free(&s))
            .min_by_key(|(i, slot)| (!slot.ids.is_empty(), slot.used, *i))
        else {
            return Placement::Full;
        };
        let kept = common(held);
        Placement::Now(if ready >= kept + WORTH_COPYING {
            Place {
                slot,
                kept: ready,
                copy_from: Some(source),
            }
        } else {
            Place {
                slot,
                kept,
                copy_from: None,
            }
        })
    }

    /// Takes a slot for a prompt that is about to be computed.
    pub(crate) fn take(&mut self, slot: usize, prompt: &[i32]) {
        self.clock += 1;
        self.slots[slot] = Slot {
            ids: prompt.to_vec(),
            busy: true,
            pending: true,
            used: self.clock,
        };
    }

    /// The prompt is computed.
    pub(crate) fn ready(&mut self, slot: usize) {
        self.slots[slot].pending = false;
    }

    /// One more token lies in the slot.
    pub(crate) fn push(&mut self, slot: usize, id: i32) {
        self.slots[slot].ids.push(id);
    }

    /// How many tokens the slot holds.
    pub(crate) fn len(&self, slot: usize) -> usize {
        self.slots[slot].ids.len()
    }

    /// The request is over; the slot keeps what it holds.
    pub(crate) fn release(&mut self, slot: usize) {
        self.slots[slot].busy = false;
        if self.slots[slot].pending {
            self.slots[slot] = Slot::default();
        }
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.slots.fill(Slot::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now(slots: &mut Slots, prompt: &[i32]) -> Place {
        match slots.place(prompt) {
            Placement::Now(place) => {
                slots.take(place.slot, prompt);
                slots.ready(place.slot);
                place
            }
            other => panic!("{other:?}"),
        }
    }

    fn ids(range: std::ops::Range<i32>) -> Vec<i32> {
        range.collect()
    }

    #[test]
    fn a_conversation_comes_back_to_its_slot() {
        let mut slots = Slots::new(3);
        let (first, other) = (ids(0..20), ids(50..70));
        assert_eq!(now(&mut slots, &first).slot, 0);
        assert_eq!(now(&mut slots, &other).slot, 1);
        slots.push(0, 100);
        slots.release(0);
        slots.release(1);
        let next = [first, vec![100, 101, 102]].concat();
        assert_eq!(
            now(&mut slots, &next),
            Place {
                slot: 0,
                kept: 21,
                copy_from: None
            }
        );
    }

    #[test]
    fn a_shared_beginning_is_copied_also_from_a_busy_slot() {
        let mut slots = Slots::new(3);
        now(&mut slots, &ids(0..20));
        let second = [ids(0..15), vec![7]].concat();
        assert_eq!(
            now(&mut slots, &second),
            Place {
                slot: 1,
                kept: 15,
                copy_from: Some(0)
            }
        );
        // The very same prompt: the last token is computed again, for its logits.
        assert_eq!(
            now(&mut slots, &ids(0..20)),
            Place {
                slot: 2,
                kept: 19,
                copy_from: Some(0)
            }
        );
        assert_eq!(slots.place(&[1]), Placement::Full);
    }

    #[test]
    fn a_prompt_waits_for_its_twin() {
        let mut slots = Slots::new(3);
        slots.take(0, &ids(0..40));
        assert_eq!(slots.place(&ids(0..40)), Placement::AfterPending);
        slots.ready(0);
        assert!(matches!(
            slots.place(&ids(0..40)),
            Placement::Now(Place { kept: 39, .. })
        ));
    }

    #[test]
    fn the_slot_that_waited_longest_is_given_away() {
        let mut slots = Slots::new(2);
        now(&mut slots, &ids(0..10));
        now(&mut slots, &ids(20..30));
        slots.release(0);
        slots.release(1);
        assert_eq!(now(&mut slots, &ids(40..50)).slot, 0);
        slots.release(0);
        assert_eq!(now(&mut slots, &ids(60..70)).slot, 1);
    }

    #[test]
    fn a_prompt_that_was_never_computed_is_forgotten() {
        let mut slots = Slots::new(1);
        slots.take(0, &ids(0..10));
        slots.release(0);
        assert_eq!(now(&mut slots, &ids(0..10)).kept, 0);
    }
}
