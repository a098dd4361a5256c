//! The user of the process that listens at an address of this machine, as the kernel's table of sockets says.

use std::net::{IpAddr, SocketAddr};

/// The state of a listening socket in the table.
const LISTENING: &str = "0A";

/// The user that listens at `at`; none where the table names no listener, or cannot be read.
pub(super) fn listening_user(at: SocketAddr) -> Option<u32> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| std::fs::read_to_string(path).unwrap_or_default());
    tables.iter().find_map(|table| user_in(table, at))
}

fn user_in(table: &str, at: SocketAddr) -> Option<u32> {
    table.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (host, port) = words.next()?.split_once(':')?;
        let (state, user) = (words.nth(1)?, words.nth(3)?);
        let host = address(host)?.to_canonical();
        let is_there = host.is_unspecified() || host == at.ip().to_canonical();
        let is_listener = is_there && state == LISTENING && u16::from_str_radix(port, 16) == Ok(at.port());
        if is_listener { user.parse().ok() } else { None }
    })
}

/// An address in the form of the table: words of four bytes, each as a number of this machine.
fn address(digits: &str) -> Option<IpAddr> {
    let words = (0..digits.len()).step_by(8).map(|begin| digits.get(begin..begin + 8));
    let words = words.map(|word| u32::from_str_radix(word?, 16).ok());
    let bytes: Vec<u8> = words.collect::<Option<Vec<u32>>>()?.into_iter().flat_map(u32::to_ne_bytes).collect();
    let of_four = <[u8; 4]>::try_from(bytes.as_slice()).map(IpAddr::from);
    of_four.or_else(|_| <[u8; 16]>::try_from(bytes.as_slice()).map(IpAddr::from)).ok()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn the_table_names_the_user_of_a_listener() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout\n   \
             0: 0100007F:1BFC 0100007F:9000 01 00000000:00000000 00:00000000 00000000     7        0 11 1\n   \
             1: 0100007F:1BFC 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 12 1\n   \
             2: 00000000:1BFD 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 13 1\n";
        let wide = "   0: 00000000000000000000000000000000:1BFE 00000000000000000000000000000000:0000 0A \
             00000000:00000000 00:00000000 00000000    33        0 14 1\n";
        let check = |table, at: &str, user| assert_eq!(user_in(table, at.parse().expect("an address")), user, "{at}");
        if cfg!(target_endian = "little") {
            check(table, "127.0.0.1:7164", Some(1000));
            check(table, "[::ffff:127.0.0.1]:7164", Some(1000));
            check(table, "127.0.0.2:7164", None);
            check(table, "127.0.0.1:7165", Some(0));
        }
        check(wide, "127.0.0.1:7166", Some(33));
        check("no table", "127.0.0.1:7166", None);
    }

    #[test]
    fn a_listener_of_this_process_has_its_user() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let at = listener.local_addr().expect("it is bound");
        assert_eq!(listening_user(at), Some(rustix::process::geteuid().as_raw()));
        drop(listener);
        assert_eq!(listening_user(at), None);
    }
}
