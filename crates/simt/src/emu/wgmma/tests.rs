use super::*;

#[test]
fn vectors_lie_where_the_descriptor_says() {
    let (base, len, element) = (1024, 4096, 1);
    let placed =
        Placed { base, len, element, index: 0, swizzle: Swizzle::None, next_group: 256, along_k: 128 };
    let places = [(0, 0), (1, 0), (0, 1), (8, 0), (9, 1)].map(|(row, k)| placed.vector(row, k));
    assert_eq!(places, [1024, 1040, 1152, 1280, 1424]);
    let wide = Placed { swizzle: Swizzle::B128, next_group: 1024, ..placed };
    let places = [(0, 0), (1, 0), (1, 1), (7, 1), (8, 0)].map(|(row, k)| wide.vector(row, k));
    assert_eq!(places, [1024, 1168, 1152, 2016, 2048]);
    // 32 bytes further along K.
    let further = Placed { index: 32, ..wide };
    assert_eq!([(0, 0), (1, 0), (2, 1)].map(|(row, k)| further.vector(row, k)), [1056, 1200, 1296]);
}

#[test]
fn warps_of_a_group_follow_each_other() {
    let here = Location::caller();
    let (begin, commit) = ((GroupCall::Begin, here), (GroupCall::Commit, here));
    let mut group = Followed::default();
    for warp in 0..WARPS {
        assert_eq!(group.step(warp, begin), Ok(()));
    }
    assert!(group.steps.is_empty());
    assert_eq!((group.step(2, commit), group.step(1, commit)), (Ok(()), Ok(())));
    assert_eq!(group.step(0, begin), Err(Some(here.into())));
    assert_eq!((group.end(2), group.end(1)), (Ok(()), Ok(())));
    assert_eq!(group.end(3), Err(Some(here.into())));
    assert_eq!(group.step(1, begin), Err(None));
}
