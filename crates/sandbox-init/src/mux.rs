//! Streams beside the requests and replies, over the same bytes: how connections to the sandbox's own loopback reach the
//! program where no socket can be handed to it.
//!
//! ```text
//! u32 0 | u32 body length | u32 stream | u8 kind | payload      a frame with an empty head
//! ```
//!
//! PID 1 opens streams, numbered upwards and never twice; both sides send on them. Each side may have as many bytes under
//! way on a stream as the other has granted: at first a window, then what the other has passed on. So no stream needs more
//! memory than its window, and one that nobody reads holds up itself alone.
//!
//! Streams are there only while a call runs. They are over when its reply begins; what comes later for one that is over
//! means nothing. Payloads are told by length alone: no bytes of a stream can be taken for a frame.

use std::collections::VecDeque;
use std::io;

use crate::frame::{self, PREFIX};

/// Most bytes of data in one frame.
pub const CHUNK: usize = 16 << 10;

/// Stream number and kind, before the payload.
const LABEL: usize = 5;

/// What one frame says of its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frame<'a> {
    /// A tool has connected. PID 1 alone says this.
    Open,
    /// Bytes, at most [`CHUNK`].
    Data(&'a [u8]),
    /// So many more bytes may be sent.
    Credit(u32),
    /// No more bytes come from here.
    End,
    /// Nothing more comes from here and nothing is read here any more. What was sent before an [`Frame::End`] stands.
    Reset,
}

impl<'a> Frame<'a> {
    /// Appends the frame as it goes over the wire.
    pub fn encode(self, stream: u32, out: &mut Vec<u8>) {
        let credit;
        let (kind, payload) = match self {
            Self::Open => (0, &[][..]),
            Self::Data(bytes) => (1, bytes),
            Self::Credit(bytes) => {
                credit = bytes.to_le_bytes();
                (2, &credit[..])
            }
            Self::End => (3, &[][..]),
            Self::Reset => (4, &[][..]),
        };
        out.extend_from_slice(&0_u32.to_le_bytes());
        out.extend_from_slice(&((LABEL + payload.len()) as u32).to_le_bytes());
        out.extend_from_slice(&stream.to_le_bytes());
        out.push(kind);
        out.extend_from_slice(payload);
    }

    fn decode(body: &'a [u8]) -> Option<(u32, Self)> {
        let (stream, rest) = body.split_first_chunk()?;
        let frame = match rest {
            [0] => Self::Open,
            [1, bytes @ ..] => Self::Data(bytes),
            [2, credit @ ..] => Self::Credit(u32::from_le_bytes(credit.try_into().ok()?)),
            [3] => Self::End,
            [4] => Self::Reset,
            _ => return None,
        };
        Some((u32::from_le_bytes(*stream), frame))
    }
}

/// A piece of what came over the wire.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Bytes of a request or a reply, never of two.
    Message(&'a [u8]),
    /// A frame of a stream.
    Stream(u32, Frame<'a>),
}

/// Tells the frames of streams from requests and replies, however the bytes are cut.
#[derive(Debug, Default)]
pub struct Decoder {
    /// The current frame so far; of a request or reply only what precedes its head.
    begun: Vec<u8>,
    /// What is in `begun` was handed out.
    whole: bool,
    /// Bytes of the current request or reply that are still to come.
    left: u64,
}

impl Decoder {
    /// Takes the next piece off the front of `bytes`; nothing when all are taken.
    ///
    /// Fails on what is no frame.
    pub fn next<'a, 'b: 'a>(&'a mut self, bytes: &mut &'b [u8]) -> io::Result<Option<Piece<'a>>> {
        if std::mem::take(&mut self.whole) {
            self.begun.clear();
        }
        if self.left > 0 && !bytes.is_empty() {
            let n = usize::try_from(self.left).map_or(bytes.len(), |left| left.min(bytes.len()));
            self.left -= n as u64;
            return Ok(bytes.split_off(..n).map(Piece::Message));
        }
        if !self.fill(PREFIX, bytes) {
            return Ok(None);
        }
        let Some(prefix) = self.begun.first_chunk::<PREFIX>() else {
            return Ok(None);
        };
        let (head, body) = frame::lengths(*prefix, u64::from(u32::MAX))?;
        if head > 0 {
            self.whole = true;
            self.left = head as u64 + body as u64;
            return Ok(Some(Piece::Message(&self.begun)));
        }
        if body > LABEL + CHUNK {
            return Err(violation("a frame is larger than allowed"));
        }
        if !self.fill(PREFIX + body, bytes) {
            return Ok(None);
        }
        self.whole = true;
        let (stream, frame) = Frame::decode(&self.begun[PREFIX..])
            .ok_or_else(|| violation("a frame of no known kind"))?;
        Ok(Some(Piece::Stream(stream, frame)))
    }

    /// What came of a frame that is not whole yet; it is forgotten here.
    pub fn take_begun(&mut self) -> Vec<u8> {
        if std::mem::take(&mut self.whole) {
            self.begun.clear();
        }
        std::mem::take(&mut self.begun)
    }

    fn fill(&mut self, wanted: usize, bytes: &mut &[u8]) -> bool {
        let n = wanted.saturating_sub(self.begun.len()).min(bytes.len());
        let (now, later) = bytes.split_at(n);
        self.begun.extend_from_slice(now);
        *bytes = later;
        self.begun.len() >= wanted
    }
}

/// One side of a stream: what came and was not passed on, and how much may be sent.
#[derive(Debug)]
pub struct Flow {
    id: u32,
    /// In bytes, the same in both directions.
    window: usize,
    received: VecDeque<u8>,
    /// Bytes the other side may still send.
    granted: usize,
    /// Bytes passed on since the last grant.
    passed: usize,
    /// Bytes this side may still send.
    credit: usize,
    /// This side sends no more.
    ended: bool,
    /// The other side sends no more.
    peer_ended: bool,
    /// The other side gave the stream up before it had said all.
    aborted: bool,
}

impl Flow {
    /// A stream that was just opened, with a window in bytes.
    pub fn new(id: u32, window: usize) -> Self {
        Self {
            id,
            window,
            received: VecDeque::new(),
            granted: window,
            passed: 0,
            credit: window,
            ended: false,
            peer_ended: false,
            aborted: false,
        }
    }

    /// Takes a frame of the other side.
    ///
    /// Fails where it sends more than was granted, or grants more than the window.
    pub fn receive(&mut self, frame: Frame<'_>) -> io::Result<()> {
        match frame {
            Frame::Open => return Err(violation("a stream was opened twice")),
            Frame::Data(bytes) => {
                if self.peer_ended {
                    return Err(violation("data after the end"));
                }
                self.granted = self
                    .granted
                    .checked_sub(bytes.len())
                    .ok_or_else(|| violation("more data than granted"))?;
                self.received.extend(bytes);
            }
            Frame::Credit(bytes) => {
                self.credit += bytes as usize;
                if self.credit > self.window {
                    return Err(violation("more credit than the window"));
                }
            }
            Frame::End => self.peer_ended = true,
            Frame::Reset if self.peer_ended => self.ended = true,
            Frame::Reset => self.aborted = true,
        }
        Ok(())
    }

    /// How many bytes may be sent now, at most [`CHUNK`].
    pub fn room(&self) -> usize {
        if self.ended {
            0
        } else {
            self.credit.min(CHUNK)
        }
    }

    /// Sends bytes, no more than there is [room](Self::room) for.
    pub fn send(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        debug_assert!(bytes.len() <= self.room());
        self.credit = self.credit.saturating_sub(bytes.len());
        Frame::Data(bytes).encode(self.id, out);
    }

    /// Says that no more bytes come from here.
    pub fn end(&mut self, out: &mut Vec<u8>) {
        if !std::mem::replace(&mut self.ended, true) {
            Frame::End.encode(self.id, out);
        }
    }

    /// Gives the stream up. Nothing is to be said where the other side did so first, or where both have ended.
    pub fn reset(&mut self, out: &mut Vec<u8>) {
        let both_ended = self.ended && self.peer_ended;
        if !self.aborted && !both_ended {
            Frame::Reset.encode(self.id, out);
        }
        self.aborted = true;
    }

    /// The next bytes to pass on; empty where there are none.
    pub fn front(&self) -> &[u8] {
        self.received.as_slices().0
    }

    /// Notes that so many bytes were passed on, and grants the other side as many once they are half the window.
    pub fn pass(&mut self, n: usize, out: &mut Vec<u8>) {
        self.received.drain(..n);
        self.passed += n;
        if 2 * self.passed >= self.window && !self.peer_ended {
            self.granted += self.passed;
            Frame::Credit(self.passed as u32).encode(self.id, out);
            self.passed = 0;
        }
    }

    /// Forgets what was not passed on: nobody takes it any more.
    pub fn discard(&mut self) {
        self.received.clear();
    }

    /// Whether this side sends no more.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Whether the other side sends no more and all it sent was passed on.
    pub fn is_drained(&self) -> bool {
        self.peer_ended && self.received.is_empty()
    }

    /// Whether there is nothing more to do.
    pub fn is_over(&self) -> bool {
        self.aborted || (self.ended && self.is_drained())
    }
}

fn violation(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// One side with all it has to send and all it got.
    struct Side {
        flow: Flow,
        decoder: Decoder,
        wire: Vec<u8>,
        send: Vec<u8>,
        got: Vec<u8>,
        messages: Vec<u8>,
    }

    impl Side {
        fn new(window: usize, send: Vec<u8>) -> Self {
            Self {
                flow: Flow::new(7, window),
                decoder: Decoder::default(),
                wire: Vec::new(),
                send,
                got: Vec::new(),
                messages: Vec::new(),
            }
        }

        /// Sends up to `n` bytes, and the end after the last.
        fn send(&mut self, n: usize) {
            let n = n.min(self.flow.room()).min(self.send.len());
            if n > 0 {
                let bytes: Vec<u8> = self.send.drain(..n).collect();
                self.flow.send(&bytes, &mut self.wire);
            }
            if self.send.is_empty() {
                self.flow.end(&mut self.wire);
            }
        }

        fn pass(&mut self, n: usize) {
            let n = n.min(self.flow.front().len());
            self.got.extend_from_slice(&self.flow.front()[..n]);
            self.flow.pass(n, &mut self.wire);
        }

        fn receive(&mut self, mut bytes: &[u8]) {
            while let Some(piece) = self.decoder.next(&mut bytes).unwrap() {
                match piece {
                    Piece::Message(bytes) => self.messages.extend_from_slice(bytes),
                    Piece::Stream(7, frame) => self.flow.receive(frame).unwrap(),
                    Piece::Stream(other, _) => panic!("stream {other}"),
                }
            }
            assert!(self.flow.received.len() <= self.flow.window);
        }
    }

    /// What happens next: who acts, what it does, how many bytes at most.
    #[derive(Debug, Clone)]
    enum Step {
        Send(bool, usize),
        Pass(bool, usize),
        Carry(bool, usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        let side = any::<bool>;
        prop_oneof![
            (side(), 0..40_000_usize).prop_map(|(s, n)| Step::Send(s, n)),
            (side(), 0..40_000_usize).prop_map(|(s, n)| Step::Pass(s, n)),
            (side(), 0..40_000_usize).prop_map(|(s, n)| Step::Carry(s, n)),
            (side(), 0..20_usize).prop_map(|(s, n)| Step::Carry(s, n)),
        ]
    }

    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(any::<u8>(), 0..100_000)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn bytes_arrive_whole_and_in_order(
            window in 1..70_000_usize,
            there in bytes(),
            back in bytes(),
            steps in proptest::collection::vec(step(), 0..200),
        ) {
            let (mut a, mut b) = (Side::new(window, there.clone()), Side::new(window, back.clone()));
            let forward = (0..).flat_map(|_| [true, false].into_iter().flat_map(|s| {
                [Step::Send(s, CHUNK), Step::Carry(s, usize::MAX), Step::Pass(s, CHUNK)]
            }));
            let mut rounds = 0;
            for step in steps.into_iter().chain(forward) {
                if a.flow.is_over() && b.flow.is_over() {
                    break;
                }
                let (Step::Send(first, n) | Step::Pass(first, n) | Step::Carry(first, n)) = step;
                let (one, other) = if first { (&mut a, &mut b) } else { (&mut b, &mut a) };
                match step {
                    Step::Send(..) => one.send(n),
                    Step::Pass(..) => one.pass(n),
                    Step::Carry(..) => {
                        let n = n.min(one.wire.len());
                        let bytes: Vec<u8> = one.wire.drain(..n).collect();
                        other.receive(&bytes);
                    }
                }
                rounds += 1;
                prop_assert!(rounds < 2_000_000, "it does not end");
            }
            prop_assert!(a.got == back && b.got == there);
        }

        #[test]
        fn messages_pass_between_frames_however_they_are_cut(
            cuts in proptest::collection::vec(1..50_usize, 0..60),
            data in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            // Data that looks like frames, and a message that does.
            let mut forged = data;
            Frame::Reset.encode(7, &mut forged);
            let message = frame::encode(&forged, 3).unwrap();
            let mut wire = Vec::new();
            Frame::Data(&forged).encode(7, &mut wire);
            wire.extend_from_slice(&message);
            wire.extend_from_slice(b"\0\0\0");
            Frame::Data(&forged).encode(7, &mut wire);
            let mut side = Side::new(10_000, Vec::new());
            let mut rest = wire.as_slice();
            for cut in cuts {
                let (now, later) = rest.split_at(cut.min(rest.len()));
                side.receive(now);
                rest = later;
            }
            side.receive(rest);
            side.pass(usize::MAX);
            prop_assert_eq!(side.got, [forged.as_slice(), forged.as_slice()].concat());
            prop_assert_eq!(side.messages, [message.as_slice(), b"\0\0\0"].concat());
            prop_assert!(!side.flow.is_over());
        }
    }

    #[test]
    fn who_breaks_the_rules_is_told() {
        let mut flow = Flow::new(1, 10);
        flow.receive(Frame::Data(&[0; 10])).unwrap();
        assert!(flow.receive(Frame::Data(&[0])).is_err());
        assert!(flow.receive(Frame::Credit(1)).is_err());
        assert!(flow.receive(Frame::Open).is_err());
        flow.receive(Frame::End).unwrap();
        assert!(flow.receive(Frame::Data(&[])).is_err());
        let large = [
            &0_u32.to_le_bytes()[..],
            &(1_u32 << 20).to_le_bytes(),
            &[0; 100],
        ]
        .concat();
        assert!(Decoder::default().next(&mut large.as_slice()).is_err());
        for body in [
            &[1, 0, 0, 0, 9][..],
            &[1, 0, 0, 0, 2, 1],
            &[1, 0, 0, 0],
            &[],
        ] {
            let mut wire = 0_u32.to_le_bytes().to_vec();
            wire.extend_from_slice(&(body.len() as u32).to_le_bytes());
            wire.extend_from_slice(body);
            assert!(
                Decoder::default().next(&mut wire.as_slice()).is_err(),
                "{body:?}"
            );
        }
    }

    #[test]
    fn a_reset_leaves_what_was_sent_before_the_end() {
        let mut out = Vec::new();
        let mut flow = Flow::new(1, 100);
        flow.receive(Frame::Data(b"answer")).unwrap();
        flow.receive(Frame::End).unwrap();
        flow.receive(Frame::Reset).unwrap();
        assert_eq!(
            (flow.room(), flow.is_over(), flow.front()),
            (0, false, &b"answer"[..])
        );
        flow.pass(6, &mut out);
        assert!(flow.is_over());
        flow.reset(&mut out);
        assert!(out.is_empty());

        let mut flow = Flow::new(1, 100);
        flow.receive(Frame::Data(b"half an ans")).unwrap();
        flow.receive(Frame::Reset).unwrap();
        assert!(flow.is_over());
    }
}
