use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;

use drillyard_sandbox_init::frame;

use super::*;

const LIMITS: Streams = Streams {
    port: 1,
    most: 2,
    window: 100,
};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

/// Frames as they go over the wire.
fn wire(frames: &[(u32, Frame<'_>)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (id, frame) in frames {
        frame.encode(*id, &mut out);
    }
    out
}

fn reply() -> Vec<u8> {
    frame::encode(&"done", 0).unwrap()
}

/// The connection's bytes as the peer of a [`Mux`] sees them.
struct Peer {
    wire: DuplexStream,
    decoder: Decoder,
}

impl Peer {
    fn of(limits: Streams) -> (Self, Mux<DuplexStream>, mpsc::Receiver<Box<dyn Stream>>) {
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        let (mux, connections) = Mux::new(theirs, limits);
        let peer = Self {
            wire: ours,
            decoder: Decoder::default(),
        };
        (peer, mux, connections)
    }

    async fn say(&mut self, frames: &[(u32, Frame<'_>)]) {
        self.wire.write_all(&wire(frames)).await.unwrap();
    }

    /// The next frame, its data in words.
    async fn hear(&mut self) -> String {
        loop {
            let mut byte = [0];
            self.wire.read_exact(&mut byte).await.unwrap();
            match self.decoder.next(&mut &byte[..]).unwrap() {
                None => {}
                Some(Piece::Stream(id, frame)) => return format!("{id} {frame:?}"),
                Some(message) => return format!("{message:?}"),
            }
        }
    }
}

/// Lets a mux work until its peer has heard something.
async fn heard(mux: &mut Mux<DuplexStream>, peer: &mut Peer) -> String {
    let mut nothing = [0];
    tokio::select! {
        read = mux.read(&mut nothing) => panic!("{read:?}"),
        frame = peer.hear() => frame,
    }
}

/// Lets a mux work until a connection comes out of it.
async fn opened(
    mux: &mut Mux<DuplexStream>,
    connections: &mut mpsc::Receiver<Box<dyn Stream>>,
) -> Box<dyn Stream> {
    let mut nothing = [0];
    tokio::select! {
        read = mux.read(&mut nothing) => panic!("{read:?}"),
        connection = connections.recv() => connection.unwrap(),
    }
}

/// Plays PID 1: opens a stream for each of `texts`, sends it in pieces, collects what comes back, replies when all are over.
async fn supervisor(
    socket: DuplexStream,
    limits: Streams,
    texts: Vec<Vec<u8>>,
    piece: usize,
) -> Vec<Vec<u8>> {
    let (mut from, mut to) = tokio::io::split(socket);
    let mut decoder = Decoder::default();
    let mut out = Vec::new();
    let mut all: Vec<_> = texts
        .into_iter()
        .zip(0..)
        .map(|(text, id)| {
            Frame::Open.encode(id, &mut out);
            (Flow::new(id, limits.window), text, 0, Vec::new())
        })
        .collect();
    let mut buffer = vec![0; 3000];
    loop {
        for (flow, text, sent, got) in &mut all {
            let n = piece.min(flow.room()).min(text.len() - *sent);
            if n > 0 && out.len() < 10_000 {
                flow.send(&text[*sent..*sent + n], &mut out);
                *sent += n;
            }
            if *sent == text.len() {
                flow.end(&mut out);
            }
            let n = flow.front().len().min(piece);
            got.extend_from_slice(&flow.front()[..n]);
            flow.pass(n, &mut out);
        }
        if out.is_empty() && all.iter().all(|(flow, ..)| flow.is_over()) {
            break;
        }
        let idle = all.iter().all(|(flow, text, sent, _)| {
            flow.front().is_empty() && (flow.room() == 0 || *sent == text.len())
        });
        tokio::select! {
            read = from.read(&mut buffer), if idle || out.len() >= 10_000 => {
                let mut bytes = &buffer[..read.unwrap()];
                while let Some(piece) = decoder.next(&mut bytes).unwrap() {
                    let Piece::Stream(id, frame) = piece else { panic!("{piece:?}") };
                    all[id as usize].0.receive(frame).unwrap();
                }
            }
            written = to.write(&out), if !out.is_empty() => {
                out.drain(..written.unwrap());
            }
            () = tokio::task::yield_now(), if !idle => {}
        }
    }
    to.write_all(&reply()).await.unwrap();
    all.into_iter().map(|(.., got)| got).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn connections_carry_their_bytes_whole_and_in_order(
        texts in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..30_000), 1..6),
        window in 1..40_000_usize,
        piece in 1..20_000_usize,
        pipe in 1..5_000_usize,
    ) {
        let window = window.max(200);
        runtime().block_on(async move {
            let limits = Streams { port: 1, most: texts.len(), window };
            let (ours, theirs) = tokio::io::duplex(pipe);
            let (mut mux, mut connections) = Mux::new(theirs, limits);
            let echo = tokio::spawn(async move {
                let mut all = JoinSet::new();
                while let Some(connection) = connections.recv().await {
                    all.spawn(async move {
                        let (mut from, mut to) = tokio::io::split(connection);
                        tokio::io::copy(&mut from, &mut to).await.unwrap();
                        to.shutdown().await.unwrap();
                    });
                }
                while let Some(done) = all.join_next().await {
                    done.unwrap();
                }
            });
            let peer = tokio::spawn(supervisor(ours, limits, texts.clone(), piece.max(100)));
            let mut message = vec![0; reply().len()];
            mux.read_exact(&mut message).await.unwrap();
            assert_eq!(message, reply());
            drop(mux);
            echo.await.unwrap();
            assert!(peer.await.unwrap() == texts);
        });
    }
}

#[tokio::test]
async fn a_reply_is_not_held_up_by_connections_that_nobody_serves() {
    let (mut peer, mut mux, mut connections) = Peer::of(LIMITS);
    peer.say(&[
        (0, Frame::Open),
        (0, Frame::Data(&[7; 100])),
        (1, Frame::Open),
        (1, Frame::Data(&[8; 100])),
    ])
    .await;
    peer.wire.write_all(&reply()).await.unwrap();
    let mut message = vec![0; reply().len()];
    mux.read_exact(&mut message).await.unwrap();
    assert_eq!(message, reply());
    // With the reply they are over.
    let mut connection = connections.recv().await.unwrap();
    let mut got = Vec::new();
    connection.read_to_end(&mut got).await.unwrap();
    assert!(connection.write_all(b"late").await.is_err());
    // What still comes of them means nothing, nor does it get into the next reply.
    peer.say(&[
        (0, Frame::Data(&[7; 100])),
        (1, Frame::Credit(1)),
        (0, Frame::Reset),
    ])
    .await;
    peer.wire.write_all(&reply()).await.unwrap();
    mux.read_exact(&mut message).await.unwrap();
    assert_eq!(message, reply());
}

#[tokio::test]
async fn no_more_is_sent_than_granted_and_no_more_granted_than_taken() {
    let (mut peer, mut mux, mut connections) = Peer::of(LIMITS);
    peer.say(&[(0, Frame::Open), (0, Frame::Data(&[7; 100]))])
        .await;
    assert_eq!(heard(&mut mux, &mut peer).await, "0 Credit(100)");
    let mut connection = connections.recv().await.unwrap();
    connection.write_all(&[9; 150]).await.unwrap();
    assert_eq!(
        heard(&mut mux, &mut peer).await,
        format!("0 {:?}", Frame::Data(&[9; 100]))
    );
    peer.say(&[(0, Frame::Credit(20))]).await;
    assert_eq!(
        heard(&mut mux, &mut peer).await,
        format!("0 {:?}", Frame::Data(&[9; 20]))
    );
    // More than was granted, though there would be room for it.
    peer.say(&[(0, Frame::Data(&[7; 101]))]).await;
    let error = mux.read(&mut [0]).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
}

#[tokio::test]
async fn the_proxys_end_closes_the_stream_behind_what_it_wrote() {
    let (mut peer, mut mux, mut connections) = Peer::of(LIMITS);
    peer.say(&[(0, Frame::Open)]).await;
    let mut connection = opened(&mut mux, &mut connections).await;
    connection.write_all(&[5; 120]).await.unwrap();
    drop(connection);
    assert_eq!(
        heard(&mut mux, &mut peer).await,
        format!("0 {:?}", Frame::Data(&[5; 100]))
    );
    peer.say(&[(0, Frame::Credit(100))]).await;
    assert_eq!(
        heard(&mut mux, &mut peer).await,
        format!("0 {:?}", Frame::Data(&[5; 20]))
    );
    assert_eq!(heard(&mut mux, &mut peer).await, "0 End");
    assert_eq!(heard(&mut mux, &mut peer).await, "0 Reset");
    assert!(mux.connections.is_empty());
}

#[tokio::test]
async fn a_container_that_breaks_the_rules_is_an_error() {
    let open = Frame::Open;
    for frames in [
        // The same stream twice; an older number; more than was granted.
        &[(3, open), (3, open)][..],
        &[(3, open), (2, open)],
        &[(0, open), (0, Frame::Data(&[0; 101]))],
        &[(0, open), (0, Frame::Credit(1))],
    ] {
        let (mut peer, mut mux, _connections) = Peer::of(LIMITS);
        peer.say(frames).await;
        let error = mux.read(&mut [0]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{frames:?}");
    }
}

#[tokio::test]
async fn floods_of_connections_are_given_up() {
    // Those that end at once and those that stay, while nobody takes any.
    for churn in [true, false] {
        let (mut peer, mut mux, _connections) = Peer::of(LIMITS);
        for id in 0..5000 {
            peer.say(&[(id, Frame::Open)]).await;
            if churn {
                peer.say(&[(id, Frame::Reset)]).await;
            }
        }
        for id in most(LIMITS) as u32..5000 {
            assert_eq!(heard(&mut mux, &mut peer).await, format!("{id} Reset"));
        }
        assert_eq!(mux.connections.len(), if churn { 0 } else { most(LIMITS) });
    }
    // Nor does it help not to listen.
    let (mut ours, theirs) = tokio::io::duplex(1 << 16);
    let (mut mux, _connections) = Mux::new(theirs, LIMITS);
    let flood = tokio::spawn(async move {
        for id in 0_u32.. {
            if ours.write_all(&wire(&[(id, Frame::Open)])).await.is_err() {
                break;
            }
        }
    });
    let error = mux.read(&mut [0]).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    drop(mux);
    flood.await.unwrap();
}

#[tokio::test]
async fn a_request_waits_for_the_rest_of_a_frame() {
    let (mut ours, theirs) = tokio::io::duplex(10);
    let (mut mux, _connections) = Mux::new(theirs, LIMITS);
    Frame::Data(&[1; 50]).encode(0, &mut mux.out);
    let expected = [&wire(&[(0, Frame::Data(&[1; 50]))])[..], b"request"].concat();
    let sending = tokio::spawn(async move {
        mux.write_all(b"request").await.unwrap();
        mux
    });
    let mut got = vec![0; expected.len()];
    ours.read_exact(&mut got).await.unwrap();
    assert_eq!(got, expected);
    sending.await.unwrap();
}
