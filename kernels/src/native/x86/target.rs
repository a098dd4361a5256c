//! Instruction encodings by instruction set and element type.

use std::arch::x86_64::__cpuid;
use std::sync::OnceLock;

use iced_x86::{Code, Register};

use crate::native::{CodeTarget, GRADIENTS_MAX, GradientFormat, Vectors, Width};

impl Vectors {
    /// Whether this machine has them, and its system keeps their registers.
    pub(crate) fn are_there(self) -> bool {
        match self {
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c"),
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
    }
}

/// The gradients that one call adds before a call costs more than a sum in tiles and a call for that.
///
/// A core reads ahead of a bounded number of streams, and the weights and the states are streams too. Measured with
/// `psbench kernels --gradients 4,8,16`, which `docs/reports/rules.md` has in figures: Sapphire Rapids and Zen 5 add
/// eight and more gradients in one call at 0.82 of memory's speed or better, whatever the tensors' addresses, and tiles
/// fall to 0.75 at some; on Zen 4 tiles are as fast or faster.
pub(crate) fn gradients_at_once() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| of_processor(&maker(), family()))
}

/// The first AMD family whose cores read ahead of as many streams as there are gradients in a call: Zen 5.
const AMD_FAMILY_OF_MANY_STREAMS: u32 = 26;

fn of_processor(maker: &[u8; 12], family: u32) -> usize {
    if maker == b"AuthenticAMD" && family < AMD_FAMILY_OF_MANY_STREAMS { 4 } else { GRADIENTS_MAX }
}

/// The name that the processor gives of its maker.
fn maker() -> [u8; 12] {
    let found = __cpuid(0);
    let mut name = [0; 12];
    for (bytes, register) in name.as_chunks_mut::<4>().0.iter_mut().zip([found.ebx, found.edx, found.ecx]) {
        *bytes = register.to_le_bytes();
    }
    name
}

/// The processor's family: the base family and, where that is 15, the extended one added to it.
fn family() -> u32 {
    let signature = __cpuid(1).eax;
    let (base, extended) = (signature >> 8 & 0xf, signature >> 20 & 0xff);
    if base == 0xf { base + extended } else { base }
}

#[test]
fn each_cpu_family_has_its_number_of_gradients_per_call() {
    assert_eq!(
        [(b"AuthenticAMD", 25), (b"AuthenticAMD", 26), (b"GenuineIntel", 6)]
            .map(|(maker, family)| of_processor(maker, family)),
        [4, GRADIENTS_MAX, GRADIENTS_MAX]
    );
    let known = std::fs::read_to_string("/proc/cpuinfo").expect("Linux has it");
    assert!(known.contains(std::str::from_utf8(&maker()).expect("a maker's name is ASCII")));
    assert!(known.lines().any(|line| {
        line.split_once(':')
            .is_some_and(|(name, value)| name.trim() == "cpu family" && value.trim() == family().to_string())
    }));
}

/// One operation's encodings: AVX2 and AVX-512, of binary32 and binary64.
pub(super) struct Encodings(pub(super) [Code; 4]);

impl CodeTarget {
    /// Bytes of a vector register.
    pub(super) const fn vector_bytes(self) -> usize {
        match self.vectors {
            Vectors::Avx2 => 32,
            Vectors::Avx512 => 64,
        }
    }

    /// Bytes of an element.
    pub(super) const fn element_bytes(self) -> usize {
        match self.width {
            Width::Single => 4,
            Width::Double => 8,
        }
    }

    /// Elements in a vector register.
    pub(super) const fn lanes(self) -> usize {
        self.vector_bytes() / self.element_bytes()
    }

    /// Bytes of a gradient's element.
    pub(super) const fn source_bytes(self, source: GradientFormat) -> usize {
        match source {
            GradientFormat::Own => self.element_bytes(),
            GradientFormat::Half | GradientFormat::Brain => 2,
        }
    }

    /// How many vector registers there are.
    pub(super) const fn registers(self) -> u8 {
        match self.vectors {
            Vectors::Avx2 => 16,
            Vectors::Avx512 => 32,
        }
    }

    /// A whole vector register.
    pub(super) fn register(self, number: u8) -> Register {
        let first = match self.vectors {
            Vectors::Avx2 => Register::YMM0,
            Vectors::Avx512 => Register::ZMM0,
        };
        first + u32::from(number)
    }

    /// The lower half of a vector register.
    pub(super) fn lower_half(self, number: u8) -> Register {
        let first = match self.vectors {
            Vectors::Avx2 => Register::XMM0,
            Vectors::Avx512 => Register::YMM0,
        };
        first + u32::from(number)
    }

    /// The encoding for this target.
    pub(super) const fn pick(self, Encodings(codes): &Encodings) -> Code {
        match (self.vectors, self.width) {
            (Vectors::Avx2, Width::Single) => codes[0],
            (Vectors::Avx2, Width::Double) => codes[1],
            (Vectors::Avx512, Width::Single) => codes[2],
            (Vectors::Avx512, Width::Double) => codes[3],
        }
    }
}

macro_rules! encodings {
    ($(
        $(#[$doc:meta])*
        $name:ident: $narrow_single:ident, $narrow_double:ident, $wide_single:ident, $wide_double:ident;
    )*) => {
        $(
            $(#[$doc])*
            pub(super) const $name: Encodings =
                Encodings([Code::$narrow_single, Code::$narrow_double, Code::$wide_single, Code::$wide_double]);
        )*
    };
}

encodings! {
    LOAD: VEX_Vmovups_ymm_ymmm256, VEX_Vmovupd_ymm_ymmm256, EVEX_Vmovups_zmm_k1z_zmmm512, EVEX_Vmovupd_zmm_k1z_zmmm512;
    STORE: VEX_Vmovups_ymmm256_ymm, VEX_Vmovupd_ymmm256_ymm, EVEX_Vmovups_zmmm512_k1z_zmm, EVEX_Vmovupd_zmmm512_k1z_zmm;
    BROADCAST: VEX_Vbroadcastss_ymm_m32, VEX_Vbroadcastsd_ymm_m64, EVEX_Vbroadcastss_zmm_k1z_xmmm32,
        EVEX_Vbroadcastsd_zmm_k1z_xmmm64;
    ADD: VEX_Vaddps_ymm_ymm_ymmm256, VEX_Vaddpd_ymm_ymm_ymmm256, EVEX_Vaddps_zmm_k1z_zmm_zmmm512b32_er,
        EVEX_Vaddpd_zmm_k1z_zmm_zmmm512b64_er;
    SUBTRACT: VEX_Vsubps_ymm_ymm_ymmm256, VEX_Vsubpd_ymm_ymm_ymmm256, EVEX_Vsubps_zmm_k1z_zmm_zmmm512b32_er,
        EVEX_Vsubpd_zmm_k1z_zmm_zmmm512b64_er;
    MULTIPLY: VEX_Vmulps_ymm_ymm_ymmm256, VEX_Vmulpd_ymm_ymm_ymmm256, EVEX_Vmulps_zmm_k1z_zmm_zmmm512b32_er,
        EVEX_Vmulpd_zmm_k1z_zmm_zmmm512b64_er;
    DIVIDE: VEX_Vdivps_ymm_ymm_ymmm256, VEX_Vdivpd_ymm_ymm_ymmm256, EVEX_Vdivps_zmm_k1z_zmm_zmmm512b32_er,
        EVEX_Vdivpd_zmm_k1z_zmm_zmmm512b64_er;
    MINIMUM: VEX_Vminps_ymm_ymm_ymmm256, VEX_Vminpd_ymm_ymm_ymmm256, EVEX_Vminps_zmm_k1z_zmm_zmmm512b32_sae,
        EVEX_Vminpd_zmm_k1z_zmm_zmmm512b64_sae;
    MAXIMUM: VEX_Vmaxps_ymm_ymm_ymmm256, VEX_Vmaxpd_ymm_ymm_ymmm256, EVEX_Vmaxps_zmm_k1z_zmm_zmmm512b32_sae,
        EVEX_Vmaxpd_zmm_k1z_zmm_zmmm512b64_sae;
    SQUARE_ROOT: VEX_Vsqrtps_ymm_ymmm256, VEX_Vsqrtpd_ymm_ymmm256, EVEX_Vsqrtps_zmm_k1z_zmmm512b32_er,
        EVEX_Vsqrtpd_zmm_k1z_zmmm512b64_er;
    /// The immediate says how.
    ROUND: VEX_Vroundps_ymm_ymmm256_imm8, VEX_Vroundpd_ymm_ymmm256_imm8,
        EVEX_Vrndscaleps_zmm_k1z_zmmm512b32_imm8_sae, EVEX_Vrndscalepd_zmm_k1z_zmmm512b64_imm8_sae;
    AND: VEX_Vandps_ymm_ymm_ymmm256, VEX_Vandpd_ymm_ymm_ymmm256, EVEX_Vandps_zmm_k1z_zmm_zmmm512b32,
        EVEX_Vandpd_zmm_k1z_zmm_zmmm512b64;
    /// The second without the bits of the first.
    AND_NOT: VEX_Vandnps_ymm_ymm_ymmm256, VEX_Vandnpd_ymm_ymm_ymmm256, EVEX_Vandnps_zmm_k1z_zmm_zmmm512b32,
        EVEX_Vandnpd_zmm_k1z_zmm_zmmm512b64;
    OR: VEX_Vorps_ymm_ymm_ymmm256, VEX_Vorpd_ymm_ymm_ymmm256, EVEX_Vorps_zmm_k1z_zmm_zmmm512b32,
        EVEX_Vorpd_zmm_k1z_zmm_zmmm512b64;
    EXCLUSIVE_OR: VEX_Vxorps_ymm_ymm_ymmm256, VEX_Vxorpd_ymm_ymm_ymmm256, EVEX_Vxorps_zmm_k1z_zmm_zmmm512b32,
        EVEX_Vxorpd_zmm_k1z_zmm_zmmm512b64;
    /// Into a vector of all ones and all zeros with AVX2, into a mask register with AVX-512.
    COMPARE: VEX_Vcmpps_ymm_ymm_ymmm256_imm8, VEX_Vcmppd_ymm_ymm_ymmm256_imm8,
        EVEX_Vcmpps_kr_k1_zmm_zmmm512b32_imm8_sae, EVEX_Vcmppd_kr_k1_zmm_zmmm512b64_imm8_sae;
    /// AVX2: the third where the fourth has its sign bit, else the second. AVX-512: the same by a mask register.
    BLEND: VEX_Vblendvps_ymm_ymm_ymmm256_ymm, VEX_Vblendvpd_ymm_ymm_ymmm256_ymm,
        EVEX_Vblendmps_zmm_k1z_zmm_zmmm512b32, EVEX_Vblendmpd_zmm_k1z_zmm_zmmm512b64;
    /// A mask register as a vector of all ones and all zeros; AVX-512 only.
    SPREAD_MASK: INVALID, INVALID, EVEX_Vpmovm2d_zmm_kr, EVEX_Vpmovm2q_zmm_kr;
    /// Any function of three bits; AVX-512 only.
    TERNARY: INVALID, INVALID, EVEX_Vpternlogd_zmm_k1z_zmm_zmmm512b32_imm8,
        EVEX_Vpternlogq_zmm_k1z_zmm_zmmm512b64_imm8;
    /// Binary16 to binary32: as many elements as the target's vector has.
    WIDEN_HALF: VEX_Vcvtph2ps_ymm_xmmm128, VEX_Vcvtph2ps_xmm_xmmm64, EVEX_Vcvtph2ps_zmm_k1z_ymmm256_sae,
        EVEX_Vcvtph2ps_ymm_k1z_xmmm128;
    /// 16 bits as 32.
    WIDEN_WORD: VEX_Vpmovzxwd_ymm_xmmm128, VEX_Vpmovzxwd_xmm_xmmm64, EVEX_Vpmovzxwd_zmm_k1z_ymmm256,
        EVEX_Vpmovzxwd_ymm_k1z_xmmm128;
    SHIFT_LEFT: VEX_Vpslld_ymm_ymm_imm8, VEX_Vpslld_xmm_xmm_imm8, EVEX_Vpslld_zmm_k1z_zmmm512b32_imm8,
        EVEX_Vpslld_ymm_k1z_ymmm256b32_imm8;
    /// binary32 as binary64.
    WIDEN_SINGLE: INVALID, VEX_Vcvtps2pd_ymm_xmmm128, INVALID, EVEX_Vcvtps2pd_zmm_k1z_ymmm256b32_sae;
}
