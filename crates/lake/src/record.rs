//! How an event lies in a file: `length (u32 LE) · CRC-32 of the payload (u32 LE) · payload (MessagePack)`.
//!
//! MessagePack rather than JSON: log-probabilities come back bit for bit, infinities included, and token ids take a third of the space.

use serde::Serialize;

use crate::event::JournalEvent;

/// A record longer than this is taken for garbage.
const MAX_PAYLOAD: u32 = 1 << 30;
/// Bytes before a payload.
const HEADER: usize = 8;

/// An event as a record.
pub(crate) fn encode(event: &JournalEvent) -> Result<Vec<u8>, String> {
    let mut record = vec![0; HEADER];
    event
        .serialize(&mut rmp_serde::Serializer::new(&mut record).with_struct_map())
        .map_err(|e| e.to_string())?;
    let payload = &record[HEADER..];
    let length = u32::try_from(payload.len())
        .ok()
        .filter(|length| *length <= MAX_PAYLOAD);
    let length =
        length.ok_or_else(|| format!("a record of {} bytes is too long", payload.len()))?;
    let sum = crc32fast::hash(payload);
    record[..4].copy_from_slice(&length.to_le_bytes());
    record[4..HEADER].copy_from_slice(&sum.to_le_bytes());
    Ok(record)
}

/// The whole records at the start of `bytes`, and how many bytes they take. The first record that is short or does not match its
/// checksum ends the reading: a kill can only tear the tail.
///
/// # Errors
/// A record that is whole and says something this version does not know.
pub(crate) fn decode(bytes: &[u8]) -> Result<(Vec<JournalEvent>, usize), String> {
    let mut events = Vec::new();
    let mut at = 0;
    while let Some(payload) = payload_at(bytes, at) {
        events
            .push(rmp_serde::from_slice(payload).map_err(|e| format!("record at byte {at}: {e}"))?);
        at += HEADER + payload.len();
    }
    Ok((events, at))
}

/// True if the record at `at` is damaged and not torn: it has a length, and where that says it ends a whole record begins.
pub(crate) fn is_damaged(bytes: &[u8], at: usize) -> bool {
    let length = bytes
        .get(at..at + 4)
        .and_then(|word| word.try_into().ok())
        .map_or(0, u32::from_le_bytes);
    length > 0
        && length <= MAX_PAYLOAD
        && payload_at(bytes, at + HEADER + length as usize).is_some()
}

fn payload_at(bytes: &[u8], at: usize) -> Option<&[u8]> {
    let word = |from: usize| {
        Some(u32::from_le_bytes(
            bytes.get(from..from + 4)?.try_into().ok()?,
        ))
    };
    let (length, sum) = (word(at)?, word(at + 4)?);
    // Nothing is that short, and zeros, which a crash of the machine may leave, would match their checksum.
    if length == 0 || length > MAX_PAYLOAD {
        return None;
    }
    let payload = bytes.get(at + HEADER..at + HEADER + length as usize)?;
    (crc32fast::hash(payload) == sum).then_some(payload)
}
