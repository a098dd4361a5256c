//! Windows over the height and width of images, for convolutions and pools.

use std::ops::Range;

/// Stride and padding of a window, along height and along width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSteps {
    /// Elements from one place of the window to the next, above zero.
    pub stride: [u32; 2],
    /// Elements outside of the image at each of its ends, which the window covers too.
    pub padding: [u32; 2],
}

impl Default for WindowSteps {
    /// Every place within the image.
    fn default() -> Self {
        Self { stride: [1, 1], padding: [0, 0] }
    }
}

impl WindowSteps {
    /// A window of this size over images of these lengths, along height and along width.
    pub(crate) fn over(self, lengths: [u64; 2], size: [u64; 2]) -> [WindowAxis; 2] {
        [0, 1].map(|axis| WindowAxis {
            length: lengths[axis],
            size: size[axis],
            stride: self.stride[axis].into(),
            padding: self.padding[axis].into(),
        })
    }
}

/// A window along one dimension of an image.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WindowAxis {
    length: u64,
    pub(crate) size: u64,
    stride: u64,
    padding: u64,
}

impl WindowAxis {
    /// The number of the window's places; none where the window is longer than the padded image, or has no stride.
    pub(crate) fn places(self) -> Option<u64> {
        let room = self.length.checked_add(2 * self.padding)?.checked_sub(self.size)?;
        room.checked_div(self.stride)?.checked_add(1)
    }

    /// The offsets in the window, at a place, whose elements are in the image, and the first of these elements.
    pub(crate) fn covered(self, place: u64) -> (Range<u64>, u64) {
        let begin = place * self.stride;
        let first = self.padding.saturating_sub(begin);
        let end = (self.length + self.padding).saturating_sub(begin).min(self.size);
        (first..end, begin.saturating_sub(self.padding))
    }
}
