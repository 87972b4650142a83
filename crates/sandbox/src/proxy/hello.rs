//! The first bytes of a tunnel: only a TLS client's greeting is let through, and the server it names must be the tunnel's.
//! Otherwise an allowed host that serves many names (a content network, another proxy) would lead anywhere.

/// Longest greeting, in bytes.
pub const MAX: usize = 16 << 10;

/// What the bytes so far are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hello {
    /// The beginning of a greeting.
    Incomplete,
    /// A whole greeting with the server's name in it, if it has one.
    Complete(Option<String>),
    /// Something else, or a greeting that hides the server's name.
    Wrong(&'static str),
}

const NOT_TLS: Hello = Hello::Wrong("only TLS is let through a tunnel");
const MALFORMED: Hello = Hello::Wrong("the TLS greeting is malformed");

/// Looks at a tunnel's first bytes.
pub fn read(bytes: &[u8]) -> Hello {
    let mut message = Vec::new();
    let mut rest = bytes;
    // A greeting may be spread over several records.
    loop {
        match *rest {
            [] => return too_long(bytes),
            [kind, ..] if kind != 22 => return NOT_TLS,
            [_, major, ..] if major != 3 => return NOT_TLS,
            [_, _, _, high, low, ref body @ ..] => {
                let length = usize::from(u16::from_be_bytes([high, low]));
                if length == 0 || length > (1 << 14) + 256 {
                    return MALFORMED;
                }
                let here = body.len().min(length);
                message.extend_from_slice(&body[..here]);
                if let Some(outcome) = whole(&message) {
                    return outcome;
                }
                if here < length {
                    return too_long(bytes);
                }
                rest = &body[length..];
            }
            _ => return Hello::Incomplete,
        }
    }
}

fn too_long(bytes: &[u8]) -> Hello {
    if bytes.len() >= MAX {
        Hello::Wrong("the TLS greeting is too long")
    } else {
        Hello::Incomplete
    }
}

/// The outcome, once the whole message is there.
fn whole(message: &[u8]) -> Option<Hello> {
    match *message {
        [kind, ..] if kind != 1 => Some(NOT_TLS),
        [_, a, b, c, ref body @ ..] => {
            let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
            if length > MAX {
                return Some(Hello::Wrong("the TLS greeting is too long"));
            }
            let body = body.get(..length)?;
            Some(greeting(body).unwrap_or(MALFORMED))
        }
        _ => None,
    }
}

/// Reads a greeting's body; nothing where a length doesn't fit.
fn greeting(body: &[u8]) -> Option<Hello> {
    let mut body = Reader(body);
    body.take(2 + 32)?; // version, random
    body.vector(1)?; // session
    body.vector(2)?; // ciphers
    body.vector(1)?; // compression
    if body.0.is_empty() {
        return Some(Hello::Complete(None));
    }
    let mut extensions = Reader(body.vector(2)?);
    if !body.0.is_empty() {
        return None;
    }
    let mut name = None;
    while !extensions.0.is_empty() {
        let kind = extensions.number()?;
        let content = extensions.vector(2)?;
        match kind {
            0 if name.is_some() => return None,
            0 => name = Some(server_name(content)?),
            0xfe0d => {
                return Some(Hello::Wrong(
                    "an encrypted TLS greeting hides the server's name",
                ));
            }
            _ => {}
        }
    }
    Some(Hello::Complete(name))
}

fn server_name(content: &[u8]) -> Option<String> {
    let mut content = Reader(content);
    let mut list = Reader(content.vector(2)?);
    // Exactly one name, of the kind "host name".
    if !content.0.is_empty() || list.take(1)? != [0] {
        return None;
    }
    let name = list.vector(2)?;
    if !list.0.is_empty() || name.is_empty() {
        return None;
    }
    std::str::from_utf8(name).ok().map(str::to_owned)
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u16> {
        self.take(2)?.try_into().ok().map(u16::from_be_bytes)
    }

    /// Bytes preceded by their length, which takes one or two bytes.
    fn vector(&mut self, width: usize) -> Option<&'a [u8]> {
        let length = self
            .take(width)?
            .iter()
            .fold(0, |n, b| n << 8 | usize::from(*b));
        self.take(length)
    }
}

#[cfg(test)]
pub mod tests {
    use proptest::prelude::*;

    use super::*;

    fn vector(width: usize, bytes: &[u8]) -> Vec<u8> {
        let mut out = bytes.len().to_be_bytes()[8 - width..].to_vec();
        out.extend_from_slice(bytes);
        out
    }

    /// A greeting with these extensions, in records of at most `record` bytes.
    pub fn client_hello(extensions: &[(u16, Vec<u8>)], record: usize) -> Vec<u8> {
        let mut body = vec![3, 3];
        body.extend([7; 32]);
        body.extend(vector(1, &[1; 32]));
        body.extend(vector(2, &[0x13, 1, 0x13, 2]));
        body.extend(vector(1, &[0]));
        let mut list = Vec::new();
        for (kind, content) in extensions {
            list.extend(kind.to_be_bytes());
            list.extend(vector(2, content));
        }
        body.extend(vector(2, &list));
        let mut message = vec![1];
        message.extend(vector(3, &body));
        message
            .chunks(record)
            .flat_map(|part| [vec![22, 3, 1], vector(2, part)].concat())
            .collect()
    }

    pub fn sni(name: &str) -> (u16, Vec<u8>) {
        let entry = [vec![0], vector(2, name.as_bytes())].concat();
        (0, vector(2, &entry))
    }

    #[test]
    fn the_name_is_read_whole_or_not_at_all() {
        let alpn = (16, vector(2, b"\x08http/1.1"));
        let hello = client_hello(
            &[alpn.clone(), sni("example.org"), (43, vec![2, 3, 4])],
            9999,
        );
        assert_eq!(read(&hello), Hello::Complete(Some("example.org".into())));
        assert_eq!(read(&client_hello(&[alpn], 5)), Hello::Complete(None));
        let two = vector(
            2,
            &[sni("a").1[2..].to_vec(), sni("b").1[2..].to_vec()].concat(),
        );
        for wrong in [
            vec![sni("a.org"), sni("b.org")],
            vec![(0, two)],
            vec![(0, vec![])],
            vec![sni("")],
            vec![sni("a"), (0xfe0d, vec![0; 9])],
        ] {
            assert!(
                matches!(read(&client_hello(&wrong, 100)), Hello::Wrong(_)),
                "{wrong:?}"
            );
        }
        for other in [
            &b"GET / HTTP/1.1\r\n"[..],
            b"CONNECT evil.org:443 HTTP/1.1\r\n",
            b"SSH-2.0-x\r\n",
            &[0x80, 0x2e, 1, 3, 1],
            &[22, 2, 0, 0, 5],
            &[22, 3, 1, 0, 0],
            &[22, 3, 1, 0xff, 0xff],
            &[22, 3, 1, 0, 1, 2],
        ] {
            assert!(matches!(read(other), Hello::Wrong(_)), "{other:?}");
        }
    }

    proptest! {
        #[test]
        fn a_greeting_reads_the_same_however_it_is_cut(
            name in "[a-z.]{1,60}",
            before in prop::collection::vec((1_u16..100, prop::collection::vec(any::<u8>(), 0..80)), 0..5),
            record in 1_usize..400,
        ) {
            let mut extensions = before;
            extensions.push(sni(&name));
            let hello = client_hello(&extensions, record);
            for cut in 0..hello.len() {
                prop_assert_eq!(read(&hello[..cut]), Hello::Incomplete, "at {}", cut);
            }
            let mut more = hello.clone();
            more.extend_from_slice(b"\x14\x03\x03 and what follows");
            prop_assert_eq!(read(&hello), Hello::Complete(Some(name.clone())));
            prop_assert_eq!(read(&more), Hello::Complete(Some(name)));
        }

        #[test]
        fn no_bytes_confuse_it(bytes in prop::collection::vec(any::<u8>(), 0..400), tls in any::<bool>()) {
            let mut bytes = bytes;
            if tls && bytes.len() > 6 {
                bytes[..2].copy_from_slice(&[22, 3]);
                bytes[3] = 0;
                bytes[5] = 1;
            }
            let _ = read(&bytes);
        }

        #[test]
        fn a_changed_greeting_never_yields_another_name_than_it_carries(
            at in 0_usize..120, value in any::<u8>(),
        ) {
            let mut hello = client_hello(&[sni("example.org")], 9999);
            let at = at % hello.len();
            hello[at] = value;
            if let Hello::Complete(Some(name)) = read(&hello) {
                let carried = hello.windows(name.len()).any(|w| w == name.as_bytes());
                prop_assert!(carried, "{}", name);
            }
        }
    }
}
