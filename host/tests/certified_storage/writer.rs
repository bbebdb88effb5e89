//! Lists of jobs, refusals, and what cannot be quantized.

use super::{devices, reference};
use ferrokv::host::certified::cases::Input;
use ferrokv::host::certified::{Annotation, Error, Geometry, Job, Problems, Rounding, Writer};
use ferrokv::host::{Buffer, Device, Stream};
use half::{bf16, f16};

struct Pools {
    stream: Stream,
    keys: Buffer<bf16>,
    values: Buffer<bf16>,
    tiles: Buffer<u8>,
    annotations: Buffer<Annotation>,
    writer: Writer<bf16>,
}

const SOURCES: usize = 3;
const DESTINATIONS: usize = 5;

fn geometry() -> Geometry {
    Geometry::new(2, 96).unwrap()
}

fn numbers(seed: u64) -> Vec<bf16> {
    Input::Uniform.pool::<bf16>(geometry(), SOURCES, seed)
}

fn pools(device: &Device, keys: &[bf16], values: &[bf16]) -> Pools {
    let stream = Stream::new(device).unwrap();
    let mut tiles = Buffer::new(device, geometry().tile_bytes(DESTINATIONS)).unwrap();
    stream.fill_u8(&mut tiles, .., 0x77).unwrap();
    stream.synchronize().unwrap();
    Pools {
        stream,
        keys: Buffer::from_slice(device, keys).unwrap(),
        values: Buffer::from_slice(device, values).unwrap(),
        tiles,
        annotations: Buffer::zeroed(device, geometry().pairs(DESTINATIONS)).unwrap(),
        // Fewer than the lists below are long.
        writer: Writer::new(device, geometry(), 2).unwrap(),
    }
}

impl Pools {
    fn write(&mut self, jobs: &[(u32, u32)]) -> Result<(), Error> {
        let jobs: Vec<Job> = jobs
            .iter()
            .map(
                |&(source, destination)| {
                    if source == Job::NONE.source { Job::NONE } else { Job::new(source, destination, 0) }
                },
            )
            .collect();
        let Pools { stream, keys, values, tiles, annotations, writer } = self;
        writer.write(stream, keys, values, &jobs, tiles, annotations)
    }
}

#[test]
fn jobs_write_what_they_name_and_nothing_else() {
    let none = (u32::MAX, u32::MAX);
    let jobs = [(2, 0), none, (0, 4), (2, 1)];
    let (keys, values) = (numbers(6), numbers(7));
    for device in devices() {
        let mut pools = pools(device, &keys, &values);
        pools.write(&jobs).unwrap();
        pools.writer.check(&pools.stream).unwrap();
        let (tiles, annotations) = (pools.tiles.to_vec().unwrap(), pools.annotations.to_vec().unwrap());
        let layout = geometry().layout();
        let (elements, bytes) = (layout.elements() as usize, layout.bytes as usize);
        for destination in 0..DESTINATIONS as u32 {
            for head in 0..2 {
                let at = layout.tile(destination, 2, head);
                let tile = &tiles[at..at + bytes];
                let annotation = annotations[destination as usize * 2 + head as usize];
                let Some((source, _)) = jobs.iter().find(|job| job.1 == destination) else {
                    assert!(tile.iter().all(|byte| *byte == 0x77));
                    assert_eq!(annotation.nu, 0.0);
                    continue;
                };
                let from = layout.originals(*source, 2, head);
                let expected = reference::quantize(
                    &keys[from..][..elements],
                    &values[from..][..elements],
                    layout,
                    Rounding::Nearest,
                    [0, 0],
                );
                assert!(tile == expected.0);
                assert_eq!(annotation, expected.1);
            }
        }
    }
}

#[test]
fn what_cannot_be_quantized_is_named_and_its_bounds_are_infinite() {
    let geometry = geometry();
    // Block 2, head 1, token 3, channel 95; and the same of block 1.
    let at = |block: usize| ((block * 2 + 1) * 16 + 3) * 96 + 95;
    let cases: [(bool, &[f32], &str); 6] = [
        (true, &[f32::NAN], "the key of block 2, KV head 1, token 3, channel 95 is not finite"),
        (true, &[1e9, f32::NEG_INFINITY], "the key of block 1, KV head 1, token 3, channel 95 is not finite"),
        (true, &[7e4], "the key of block 2, KV head 1, token 0, channel 95 is beyond f16"),
        (false, &[f32::INFINITY], "the value of block 2, KV head 1, token 3, channel 95 is not finite"),
        (false, &[69000.0], "the value of block 2, KV head 1, token 3, channel 95 is beyond f16"),
        (false, &[1e30, -1e30], "the value of block 1, KV head 1, token 3, channel 80 is beyond f16"),
    ];
    for device in devices() {
        for (of_keys, bad, message) in cases {
            let (mut keys, mut values) = (numbers(8), numbers(9));
            for (i, x) in bad.iter().enumerate() {
                let pool = if of_keys { &mut keys } else { &mut values };
                pool[at(2 - i)] = bf16::from_f32(*x);
                if *x == 7e4 {
                    // No f16 is near enough to a channel of which all keys are beyond.
                    (0..16).for_each(|t| pool[at(2) - 3 * 96 + t * 96] = bf16::from_f32(*x));
                }
            }
            let mut pools = pools(device, &keys, &values);
            pools.write(&[(0, 0), (1, 1), (2, 2)]).unwrap();
            let error = pools.writer.check(&pools.stream).unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}\n{message}");
            // Told once, and forgotten.
            pools.writer.check(&pools.stream).unwrap();
            let annotations = pools.annotations.to_vec().unwrap();
            for (i, a) in annotations[..geometry.pairs(3)].iter().enumerate() {
                let bad = i % 2 == 1 && i / 2 > 2 - bad.len();
                assert_eq!(a.eps == f32::INFINITY, of_keys && bad, "{i}: {a:?}");
                assert_eq!(a.eta == f32::INFINITY, !of_keys && bad, "{i}: {a:?}");
                assert!(!(a.eps.is_nan() || a.eta.is_nan() || a.nu.is_nan() || a.zeta.is_nan()));
            }
        }
    }
}

#[test]
fn a_verdict_tells_the_worst_first() {
    let geometry = geometry();
    assert!(geometry.verdict(Problems::NONE).is_ok());
    let problems = Problems { key_range: 5, value_not_finite: 7, ..Problems::NONE };
    assert!(
        matches!(geometry.verdict(problems), Err(Error::NotFinite { what: "value", at }) if at.channel == 7)
    );
    let problems = Problems { key_range: 96, ..Problems::NONE };
    assert_eq!(
        geometry.verdict(problems).unwrap_err().to_string(),
        "the key of block 0, KV head 0, token 1, channel 0 is beyond f16, in which quantized attention computes; \
         store this cache's keys scaled down"
    );
}

#[test]
fn bad_lists_and_buffers_are_refused_before_any_launch() {
    let device = &devices()[0];
    let mut pools = pools(device, &numbers(1), &numbers(2));
    let mut refused = |jobs: &[(u32, u32)]| pools.write(jobs).unwrap_err().to_string();
    assert_eq!(
        refused(&[(0, 0), (3, 1)]),
        "job 1 names source block 3, and there are 3; pass blocks of the pools"
    );
    assert_eq!(
        refused(&[(0, 5)]),
        "job 0 names destination block 5, and there are 5; pass blocks of the pools"
    );
    assert_eq!(refused(&[(0, 2), (1, 3), (2, 2)]), "two jobs write block 2; give each destination once");
    pools.keys = Buffer::from_slice(device, &numbers(1)[1..]).unwrap();
    assert_eq!(
        pools.write(&[(0, 0)]).unwrap_err().to_string(),
        "the pool of keys has 9215 elements, expected a multiple of 3072; allocate it for 2 KV heads of 96 channels"
    );
    pools.keys = Buffer::from_slice(device, &numbers(1)).unwrap();
    pools.annotations = Buffer::zeroed(device, 1).unwrap();
    assert!(matches!(pools.write(&[(0, 0)]), Err(Error::Length { what: "the buffer of annotations", .. })));
    assert!(pools.tiles.to_vec().unwrap().iter().all(|byte| *byte == 0x77));
    assert_eq!(
        Geometry::new(8, 80).unwrap_err().to_string(),
        "8 KV heads of 80 channels are not supported; use 1 to 1024 heads of 64, 96, 128 or 256"
    );
    assert!(matches!(Geometry::new(0, 64), Err(Error::Geometry { .. })));
    assert!(matches!(Writer::<f16>::new(device, geometry(), 0), Err(Error::TooMany { .. })));
    assert!(matches!(Writer::<f16>::new(device, geometry(), 1 << 40), Err(Error::TooMany { .. })));
}
