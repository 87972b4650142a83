//! Which addresses belong to the public internet: a listed name that resolves to any other would lead tools into this
//! machine, its network or its cloud's metadata service.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

/// Whether an address is one of the public internet and not one of this machine's own.
pub fn is_public(address: IpAddr) -> bool {
    let global = match address.to_canonical() {
        IpAddr::V4(v4) => is_global_v4(v4),
        IpAddr::V6(v6) => is_global_v6(v6),
    };
    global && !is_own(address)
}

fn is_global_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    !matches!(
        (a, b, c),
        (0 | 10 | 127 | 224..=255, _, _) // this network, private, loopback, multicast, reserved, broadcast
            | (100, 64..=127, _) // shared by providers
            | (169, 254, _) // link-local, metadata services
            | (172, 16..=31, _)
            | (192, 0, 0 | 2) // protocol assignments, documentation
            | (192, 88, 99) // 6to4 relays
            | (192, 168, _)
            | (198, 18..=19, _) // benchmarks
            | (198, 51, 100) // documentation
            | (203, 0, 113)
    )
}

fn is_global_v6(address: Ipv6Addr) -> bool {
    let s = address.segments();
    let embedded = || Ipv4Addr::from((u32::from(s[6]) << 16) | u32::from(s[7]));
    match s[0] {
        // Translated v4 addresses (NAT64) are as public as what they stand for.
        0x64 => s[1] == 0xff9b && s[2..6] == [0; 4] && is_global_v4(embedded()),
        // Tunnels (Teredo), identifiers, documentation, 6to4.
        0x2001 => s[1] >= 0x200 && s[1] != 0xdb8,
        0x2002 => false,
        0x3fff => s[1] >= 0x1000,
        first => first & 0xe000 == 0x2000,
    }
}

/// Whether this machine itself has the address: then the kernel would also choose it as the source. Nothing is sent.
fn is_own(address: IpAddr) -> bool {
    let unspecified: IpAddr = match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let Ok(socket) = UdpSocket::bind((unspecified, 0)) else {
        // Unknown (no descriptors left?): then rather not. A machine without IPv6 has no such address either way.
        return address.is_ipv4();
    };
    socket
        .connect((address, 9))
        .and_then(|()| socket.local_addr())
        .is_ok_and(|source| source.ip().to_canonical() == address.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn global(text: &str) -> bool {
        match text.parse::<IpAddr>().unwrap().to_canonical() {
            IpAddr::V4(v4) => is_global_v4(v4),
            IpAddr::V6(v6) => is_global_v6(v6),
        }
    }

    #[test]
    fn only_the_public_internet_is_public() {
        for inside in [
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "100.127.255.255",
            "127.0.0.1",
            "127.255.0.1",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.170",
            "192.0.2.1",
            "192.168.1.1",
            "198.18.0.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::1",
            "100::1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "3fff::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(!global(inside), "{inside}");
        }
        for outside in [
            "1.1.1.1",
            "9.9.9.9",
            "100.63.0.1",
            "100.128.0.1",
            "151.101.0.223",
            "172.15.0.1",
            "172.32.0.1",
            "198.20.0.1",
            "2606:4700::1111",
            "2001:4860:4860::8888",
            "64:ff9b::808:808",
            "::ffff:8.8.8.8",
        ] {
            assert!(global(outside), "{outside}");
        }
    }

    #[test]
    fn this_machine_knows_itself() {
        assert!(is_own("127.0.0.1".parse().unwrap()));
        assert!(is_own("127.9.9.9".parse().unwrap()) || !is_public("127.9.9.9".parse().unwrap()));
    }
}
