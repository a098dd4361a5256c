//! CRC32C, the checksum of frames, payloads and journal records.
//!
//! Files of checkpoints have a digest (`blake3`) instead, because a CRC detects accidents and not manipulation.

use crc_fast::{CrcAlgorithm, Digest};

/// The initial state of a CRC32C, and the mask that inverts it at the end.
const INVERTED: u64 = 0xffff_ffff;
/// The polynomial of CRC32C, and x to the 8th: their highest coefficients are in the lowest bits.
const POLYNOMIAL: u32 = 0x82f6_3b78;
const X_TO_THE_8TH: u32 = 1 << 23;

/// The CRC32C of `bytes`; zero for none.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u32 {
    narrow(crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes))
}

/// The CRC32C of some bytes and `bytes` after them, where `sum` is that of the first ones.
#[must_use]
pub fn append(sum: u32, bytes: &[u8]) -> u32 {
    if sum == 0 {
        // Zero is the checksum of no bytes, and of bytes with the same checksum.
        return checksum(bytes);
    }
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(sum) ^ INVERTED);
    digest.update(bytes);
    narrow(digest.finalize())
}

/// The CRC32C of some bytes and others after them: `first` is that of the former, `second` that of the latter.
#[must_use]
pub fn join(first: u32, second: u32, bytes_of_second: u64) -> u32 {
    // The former bytes stand as many bits before the latter ones: their remainder is multiplied by that power of x.
    let (mut shifted, mut power, mut left) = (first, X_TO_THE_8TH, bytes_of_second);
    while 0 < left && shifted != 0 {
        if left % 2 == 1 {
            shifted = product(power, shifted);
        }
        power = product(power, power);
        left /= 2;
    }
    shifted ^ second
}

/// The product of two polynomials modulo that of CRC32C; their highest coefficients are in the lowest bits.
fn product(one: u32, mut other: u32) -> u32 {
    let mut sum = 0;
    for place in (0..u32::BITS).rev() {
        sum ^= if one >> place & 1 == 1 { other } else { 0 };
        other = (other >> 1) ^ if other & 1 == 1 { POLYNOMIAL } else { 0 };
    }
    sum
}

fn narrow(sum: u64) -> u32 {
    u32::try_from(sum).expect("a CRC32C has 32 bits")
}

#[cfg(test)]
mod tests {
    use super::{append, checksum, join};

    /// The vectors of RFC 3720, B.4.
    #[test]
    fn checksums_are_crc32c_as_in_rfc_3720() {
        let check = |bytes: &[u8], expected| assert_eq!(checksum(bytes), expected, "{bytes:?}");
        check(&[], 0);
        check(&[0; 32], 0x8a91_36aa);
        check(&[0xff; 32], 0x62a8_ab43);
        check(&(0..32).collect::<Vec<u8>>(), 0x46dd_794e);
        check(b"123456789", 0xe306_9283);
    }

    #[test]
    fn checksums_append_and_join_at_any_cut() {
        let bytes: Vec<u8> = (0..10_000_u32).map(|at| u8::try_from(at * 7 % 251).expect("it is below 251")).collect();
        for cut in [0, 1, 7, 63, 64, 65, 255, 256, 4096, 9_999, 10_000] {
            let (first, second) = bytes.split_at(cut);
            assert_eq!(append(checksum(first), second), checksum(&bytes), "cut at {cut}");
            let joined = join(checksum(first), checksum(second), second.len() as u64);
            assert_eq!(joined, checksum(&bytes), "cut at {cut}");
        }
    }
}
