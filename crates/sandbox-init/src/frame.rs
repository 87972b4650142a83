//! Frames: a JSON head for structure and a body for bytes, so that file contents never become JSON.
//!
//! ```text
//! u32 head length | u32 body length | head (JSON) | body (raw bytes)      lengths little-endian
//! ```
//!
//! A head refers to bytes of its body by [`Span`]. A frame with no head at all belongs to a stream, see [`crate::mux`].

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Bytes before the head.
pub const PREFIX: usize = 8;

/// Largest head a reader accepts, in bytes.
pub const MAX_HEAD: u32 = 64 << 20;

/// A piece of a frame's body.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Offset in bytes from the start of the body.
    pub at: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Span {
    /// The bytes this span names, or nothing when it reaches beyond the body.
    pub fn of(self, body: &[u8]) -> Option<&[u8]> {
        let at = usize::try_from(self.at).ok()?;
        let len = usize::try_from(self.len).ok()?;
        body.get(at..at.checked_add(len)?)
    }
}

/// Appends bytes to a body and says where they lie.
pub fn put(body: &mut Vec<u8>, bytes: &[u8]) -> Span {
    let span = Span {
        at: body.len() as u64,
        len: bytes.len() as u64,
    };
    body.extend_from_slice(bytes);
    span
}

/// Prefix and head of a frame; the body follows it unchanged.
pub fn encode<T: Serialize>(head: &T, body_len: usize) -> io::Result<Vec<u8>> {
    let mut out = vec![0; PREFIX];
    serde_json::to_writer(&mut out, head)?;
    let head_len = u32::try_from(out.len() - PREFIX).map_err(io::Error::other)?;
    let body_len = u32::try_from(body_len).map_err(io::Error::other)?;
    out[..4].copy_from_slice(&head_len.to_le_bytes());
    out[4..PREFIX].copy_from_slice(&body_len.to_le_bytes());
    Ok(out)
}

/// Head and body lengths out of a frame's first [`PREFIX`] bytes; refuses frames beyond the given body size.
pub fn lengths(prefix: [u8; PREFIX], max_body: u64) -> io::Result<(usize, usize)> {
    let wire = u64::from_le_bytes(prefix);
    let (head, body) = (wire as u32, (wire >> 32) as u32);
    if head > MAX_HEAD || u64::from(body) > max_body {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("frame of {head} + {body} bytes is larger than allowed"),
        ));
    }
    Ok((head as usize, body as usize))
}

/// Parses a head.
pub fn decode<T: DeserializeOwned>(head: &[u8]) -> io::Result<T> {
    serde_json::from_slice(head).map_err(io::Error::from)
}

/// Writes one frame to a blocking stream.
pub fn write<T: Serialize>(to: &mut impl Write, head: &T, body: &[u8]) -> io::Result<()> {
    let mut bytes = encode(head, body.len())?;
    if body.len() <= 64 << 10 {
        bytes.extend_from_slice(body);
        to.write_all(&bytes)
    } else {
        to.write_all(&bytes)?;
        to.write_all(body)
    }
}

/// Reads one frame from a blocking stream, passing over those without a head; nothing at a clean end of the stream.
pub fn read<T: DeserializeOwned>(
    from: &mut impl Read,
    max_body: u64,
) -> io::Result<Option<(T, Vec<u8>)>> {
    loop {
        let mut prefix = [0; PREFIX];
        let mut got = 0;
        while got < PREFIX {
            match from.read(&mut prefix[got..]) {
                Ok(0) if got == 0 => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => got += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        let (head_len, body_len) = lengths(prefix, max_body)?;
        let mut head = vec![0; head_len];
        from.read_exact(&mut head)?;
        let mut body = vec![0; body_len];
        from.read_exact(&mut body)?;
        if head_len > 0 {
            return Ok(Some((decode(&head)?, body)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_comes_back_as_it_went_in() {
        let mut body = Vec::new();
        let a = put(&mut body, b"first");
        let b = put(&mut body, b"\0second\xff");
        let mut wire = Vec::new();
        write(&mut wire, &(a, b), &body).unwrap();
        let ((a, b), body): ((Span, Span), Vec<u8>) =
            read(&mut wire.as_slice(), 1 << 20).unwrap().unwrap();
        assert_eq!(a.of(&body), Some(&b"first"[..]));
        assert_eq!(b.of(&body), Some(&b"\0second\xff"[..]));
    }

    #[test]
    fn frames_of_streams_are_passed_over() {
        let mut wire = Vec::new();
        crate::mux::Frame::Data(b"late").encode(1, &mut wire);
        write(&mut wire, &7, b"body").unwrap();
        crate::mux::Frame::End.encode(1, &mut wire);
        let mut from = wire.as_slice();
        assert_eq!(read(&mut from, 10).unwrap(), Some((7, b"body".to_vec())));
        assert_eq!(read::<i32>(&mut from, 10).unwrap(), None);
    }

    #[test]
    fn spans_beyond_the_body_and_oversized_frames_are_refused() {
        assert_eq!(
            Span {
                at: 1,
                len: u64::MAX
            }
            .of(b"abc"),
            None
        );
        assert_eq!(Span { at: 4, len: 0 }.of(b"abc"), None);
        let mut wire = Vec::new();
        write(&mut wire, &(), &[0; 100]).unwrap();
        assert!(read::<()>(&mut wire.as_slice(), 99).is_err());
        assert!(read::<()>(&mut &wire[..5], 100).is_err());
        assert!(read::<()>(&mut &wire[..0], 100).unwrap().is_none());
    }
}
