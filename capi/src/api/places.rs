//! Destinations of fetched parameters: buffers of the caller, or memory that the library allocates for the caller.

use std::ffi::{c_int, c_void};

use pserver_core::dtype::{ElementType, Half};
use pserver_core::error::Failure;

use super::allocation::Allocation;
use super::checked::{Room, TensorClaim};
use pserver_client::{Client, DestinationSlice, Extent, GradientSlice, HeldBuffers, check_half};

/// Destinations of the parameters of one call, of known lengths. They overlap neither each other nor memory from which
/// the call sends.
pub(super) struct Places<'call> {
    places: Vec<Place<'call>>,
    /// The registered buffers that contain the destinations and the contents that the call sends.
    _memory: HeldBuffers,
}

/// A parameter that is fetched: the caller's buffer for it, if there is one, and the element type of the fetched value
/// where that is not the parameter's own type.
#[derive(Clone, Copy)]
pub(super) struct Asked<'call> {
    pub(super) name: &'call str,
    pub(super) room: Option<Room>,
    pub(super) half: Option<Half>,
}

struct Place<'call> {
    name: &'call str,
    half: Option<Half>,
    element_type: c_int,
    bytes: usize,
    memory: Memory,
}

enum Memory {
    Theirs(Room),
    Ours(Allocation),
}

/// The outputs of one parameter, written when the call succeeds.
pub(super) struct Filled {
    pub(super) element_type: c_int,
    pub(super) content: *mut c_void,
    pub(super) content_len: c_int,
}

impl<'call> Places<'call> {
    /// Finds the length of each destination. Where the caller has no buffer, memory is allocated.
    pub(super) fn measure(
        client: &Client,
        wanted: &[Asked<'call>],
        given: &[GradientSlice<'_>],
    ) -> Result<Self, Failure> {
        let rooms = wanted.iter().filter_map(|asked| asked.room.as_ref());
        let rooms = rooms.map(|room| Extent::new(room.start.addr().get(), room.bytes));
        let memory = client.hold(rooms.chain(given.iter().map(|one| Extent::of(one.content))));
        let names: Vec<&str> = wanted.iter().map(|asked| asked.name).collect();
        let place = |(asked, size): (&Asked<'call>, _)| Place::new(*asked, size);
        let places: Vec<_> = wanted.iter().zip(client.measure(&names)?).map(place).collect::<Result<_, _>>()?;
        let mut extents = CallExtents::default();
        for place in &places {
            if let Memory::Theirs(room) = &place.memory {
                extents.written(place.name, room.start.addr().get(), place.bytes);
            }
        }
        given.iter().for_each(|one| extents.read(one.name, one.content));
        extents.refuse_overlaps()?;
        Ok(Self { places, _memory: memory })
    }

    /// The destinations as the client takes them.
    pub(super) fn wanted(&mut self) -> Vec<DestinationSlice<'_>> {
        self.places.iter_mut().map(Place::wanted).collect()
    }

    /// The outputs, in order. Memory that the library allocated belongs to the caller from now on.
    pub(super) fn hand_over(self) -> impl Iterator<Item = Filled> {
        self.places.into_iter().map(|place| Filled {
            element_type: place.element_type,
            content_len: c_int::try_from(place.bytes).expect("it was measured"),
            content: match place.memory {
                Memory::Theirs(room) => room.start.as_ptr().cast(),
                Memory::Ours(allocation) => allocation.give(),
            },
        })
    }

    /// Whether the buffer of a destination is exactly as long as its parameter.
    pub(super) fn refuse_inexact(&self) -> Result<(), Failure> {
        let inexact = self.places.iter().find_map(|place| match place.memory {
            Memory::Theirs(room) if room.bytes != place.bytes => Some((place.name, room.bytes, place.bytes)),
            Memory::Theirs(_) | Memory::Ours(_) => None,
        });
        inexact.map_or(Ok(()), |(name, found, expected)| {
            Err(Failure::call(format!(
                "parameter \"{name}\": content_len is {found} bytes; expected exactly its length, {expected} bytes"
            )))
        })
    }
}

impl<'call> Asked<'call> {
    /// The type that the caller names, if that is a half-precision type and the buffer is as long as a value of that
    /// type. Any other type that the caller names is replaced by the parameter's own.
    pub(super) fn of(name: &'call str, claim: &TensorClaim) -> Result<Self, Failure> {
        let half = ElementType::from_number(claim.element_type.into()).and_then(Half::of);
        Ok(Self { half, ..Self::whole(name, Room::of(claim.content, claim.content_len, name)?) })
    }

    /// The parameter's own type.
    pub(super) fn whole(name: &'call str, room: Option<Room>) -> Self {
        Self { name, room, half: None }
    }
}

impl Places<'static> {
    /// The destinations as the client takes them for a started call; each is in the caller's memory.
    pub(super) fn lent(&self) -> Result<Vec<DestinationSlice<'static>>, Failure> {
        self.places.iter().map(Place::lent).collect()
    }
}

impl<'call> Place<'call> {
    /// The destination for a parameter of this element type and this length in bytes.
    fn new(asked: Asked<'call>, (declared, bytes): (ElementType, u64)) -> Result<Self, Failure> {
        let Asked { name, room, half } = asked;
        // A caller that gives no type may have left the field unset, and has room for the whole value.
        let halves = bytes / declared.bytes() * ElementType::Float16.bytes();
        let half = half.filter(|_| room.is_some_and(|room| room.bytes as u64 == halves));
        check_half(name, declared, half)?;
        let (element_type, bytes) = half.map_or((declared, bytes), |half| (half.element_type(), bytes / 2));
        let fits = c_int::try_from(bytes).ok().and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = fits.ok_or_else(|| {
            let most = c_int::MAX;
            Failure::call(format!(
                "parameter \"{name}\" has {bytes} bytes; expected at most {most}, as content_len is an int"
            ))
        })?;
        let memory = match room {
            Some(room) if room.bytes < bytes => {
                return Err(Failure::call(format!(
                    "parameter \"{name}\": content has room for {} bytes (content_len); expected room for its \
                     {bytes} bytes",
                    room.bytes
                )));
            }
            Some(room) => Memory::Theirs(room),
            None => Memory::Ours(Allocation::zeroed(bytes)?),
        };
        Ok(Self { name, half, element_type: c_int::from(element_type.number()), bytes, memory })
    }

    fn wanted(&mut self) -> DestinationSlice<'_> {
        let content = match &mut self.memory {
            Memory::Theirs(room) => room.bytes_mut(self.bytes),
            Memory::Ours(allocation) => allocation.bytes_mut(),
        };
        DestinationSlice { name: self.name, content, half: self.half }
    }
}

impl Place<'static> {
    fn lent(&self) -> Result<DestinationSlice<'static>, Failure> {
        match self.memory {
            Memory::Theirs(room) => {
                Ok(DestinationSlice { name: self.name, content: room.lent(self.bytes), half: self.half })
            }
            Memory::Ours(_) => Err(Failure::call(format!(
                "parameter \"{}\": content is NULL; expected the caller's memory, as this call is waited for later",
                self.name
            ))),
        }
    }
}

/// The memory ranges of one call: the ranges that it reads, and those that it writes to.
#[derive(Default)]
pub(super) struct CallExtents<'a>(Vec<Span<'a>>);

impl<'a> CallExtents<'a> {
    pub(super) fn read<T>(&mut self, name: &'a str, slice: &[T]) {
        self.0.push(Span::new(slice.as_ptr().addr(), size_of_val(slice), name, false));
    }

    pub(super) fn written(&mut self, name: &'a str, start: usize, bytes: usize) {
        self.0.push(Span::new(start, bytes, name, true));
    }

    /// Refuses a range to write to that overlaps any other range of the call.
    pub(super) fn refuse_overlaps(mut self) -> Result<(), Failure> {
        self.0.retain(|span| span.start < span.end);
        self.0.sort_unstable_by_key(|span| span.start);
        first_overlap(&self.0).map_or(Ok(()), |(one, other)| {
            Err(Failure::call(format!(
                "the contents or the ids of \"{}\" and \"{}\" overlap; expected memory of its own for what is fetched",
                one.name, other.name
            )))
        })
    }
}

/// A range of the caller's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span<'a> {
    start: usize,
    end: usize,
    name: &'a str,
    is_room: bool,
}

impl<'a> Span<'a> {
    fn new(start: usize, bytes: usize, name: &'a str, is_room: bool) -> Self {
        Self { start, end: start.saturating_add(bytes), name, is_room }
    }
}

/// The first of the sorted spans that begins within an earlier one, unless both are only read.
fn first_overlap<'a>(spans: &[Span<'a>]) -> Option<(Span<'a>, Span<'a>)> {
    let mut furthest: Option<Span<'a>> = None;
    let mut furthest_room: Option<Span<'a>> = None;
    for span in spans {
        let before = if span.is_room { furthest } else { furthest_room };
        if let Some(before) = before.filter(|before| span.start < before.end) {
            return Some((before, *span));
        }
        let further = |known: Option<Span<'a>>| known.filter(|known| span.end <= known.end).or(Some(*span));
        furthest = further(furthest);
        if span.is_room {
            furthest_room = further(furthest_room);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spans as `start..end`, with a `w` before those that are written to.
    fn check(spans: &[&str], overlaps: bool) {
        let span = |text: &&'static str| {
            let (start, end) = text.trim_start_matches('w').split_once("..").expect("start..end");
            let number = |text: &str| text.parse::<usize>().expect("a number");
            Span::new(number(start), number(end) - number(start), text, text.starts_with('w'))
        };
        let spans: Vec<&'static str> = spans.iter().map(|text| &*text.to_string().leak()).collect();
        let mut spans: Vec<_> = spans.iter().map(span).collect();
        spans.sort_unstable_by_key(|span| span.start);
        assert_eq!(first_overlap(&spans).is_some(), overlaps, "{spans:?}");
    }

    #[test]
    fn destination_buffers_do_not_overlap() {
        check(&[], false);
        check(&["w0..4", "w4..8", "8..12"], false);
        check(&["0..8", "0..8", "4..12"], false);
        check(&["w0..4", "w0..4"], true);
        check(&["w0..8", "4..6"], true);
        check(&["0..8", "w4..6"], true);
        check(&["w0..100", "10..20", "20..30"], true);
        check(&["0..100", "10..20", "w90..95"], true);
        check(&["0..10", "w10..20", "0..4", "19..20"], true);
        check(&["w0..10", "10..40", "20..30", "w40..50"], false);
    }
}
