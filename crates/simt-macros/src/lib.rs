//! The attributes and the unroll macro of `simt`; use them as `simt::kernel`, `simt::test`, `simt::unroll`.

mod args;
mod arms;
mod cluster;
mod kernel;
mod message;
mod print;
mod refusals;
mod stop;
mod test;
mod unroll;

use proc_macro::TokenStream;

/// Makes a kernel of a plain function.
///
/// On the device each instance becomes an `extern "ptx-kernel"` entry. On the host the function stays as it
/// is, and a module of the same name holds `kernel()`, which returns the typed handle that every backend
/// launches; `Args`, the struct that a launch takes, with a field for each parameter; and `INSTANCES`, what
/// is known of each instance without its types.
///
/// ```ignore
/// #[kernel]                                          // entry `scale`
/// pub fn scale(x: Global<f32>, y: GlobalMut<f32>, factor: f32, n: u32) { /* … */ }
///
/// #[kernel(system = int8, instances(f32, f16), max_threads = 256)]   // `int8_widen_f32`, `int8_widen_f16`
/// pub fn widen<T: Element>(x: Global<T>, y: GlobalMut<f32>, n: u32) { /* … */ }
///
/// #[kernel(instances((f32, 16), (f16, 16)))]         // `sum_f32_16`, `sum_f16_16`
/// pub fn sum<T: Element, const TOKENS: usize>(/* … */) { /* … */ }
///
/// // On the host:
/// stream.launch(&widen::kernel::<f16>(), shape, widen::Args { x, y, n })?;
/// ```
///
/// The generic parameters of `Args` are those of the kernel that occur in its parameters' types, in their
/// order. A parameter's doc comment becomes its field's, and `_x`, which the kernel does not use, is the
/// field `x`.
///
/// Options:
/// - `system = NAME`: prefix of the entry names, so that two systems may use the same function name.
/// - `instances(…)`: the instances of a generic kernel; each a type or constant, or a tuple of them in the
///   order of the generic parameters. `kernel::<…>()` of an instance that is not listed does not compile. An
///   instance may have its own `max_threads`: `instances((f32, 64) => 384, (f32, 128))`.
/// - `args = PATH`: the kernel takes the `Args` of the kernel of that path, which has the same parameters:
///   for kernels that one launch chooses among. `PATH` starts with `crate`, or with a name that the kernel's
///   own module knows.
/// - `max_threads = N`: the most threads a block may have (`.maxntid`), so that ptxas may use more registers.
/// - `min_blocks = N`: blocks that shall fit a multiprocessor at once (`.minnctapersm`).
/// - `min_sm = 90`: the kernel uses what GPUs have from sm_90 on. The PTX of lower targets is without it, and
///   its launch there is an error that says so; the emulator runs it.
/// - `only_sm = 90`: the kernel uses what one generation of GPUs alone has, such as `simt::wgmma`. It is in
///   the PTX of that target, for GPUs of just that compute capability; elsewhere a launch is an error.
/// - `cluster = N`, `cluster = (X, Y, Z)`: the grid runs in clusters of so many blocks, eight at the most,
///   which start together and reach each other's shared memory (`.reqnctapercluster`): see `simt::cluster`.
///   The grid is a multiple of it. It needs `min_sm = 90`.
/// - `overlaps`: a launch may start while the launch ahead of it in the stream still runs; on the device the
///   entry waits for that one's end before it does anything else, so that what the kernel reads and writes is
///   ordered as ever.
/// - `overlaps = in_turn`: the same, and the launch behind this one may start only when this one has stopped
///   waiting: where its blocks, with much shared memory say, would stand in the way of launches that are
///   ahead.
/// - `overlaps = late`: the same as `overlaps`, but the kernel itself waits, by one call of
///   `thread::wait_for_previous` on no branch. Before it the kernel may `load_ahead` what no launch of the
///   stream writes, `peek` and `prefetch`, and touch no other memory.
/// - `overlaps = by_hand`: the same as `overlaps = late`, and the launch behind this one may start only where
///   the kernel calls `thread::let_next_start`, or ends: where what that launch loads ahead would hold up
///   this one's own loads.
#[proc_macro_attribute]
pub fn kernel(options: TokenStream, item: TokenStream) -> TokenStream {
    let item = proc_macro2::TokenStream::from(item);
    let mistaken = |error: syn::Error| refusals::mistaken(&error, item.clone());
    kernel::expand(options.into(), item.clone()).unwrap_or_else(mistaken).into()
}

/// A function that kernels call: a part of them on the device; on the host the emulator's errors name its
/// caller's line, so that a mistake shows where the kernel makes it.
///
/// With `in_line` it is a part of its caller on the host, too, as primitives are: the emulator runs those in
/// which threads wait for each other faster so. It takes the compiler longer.
#[proc_macro_attribute]
pub fn device(options: TokenStream, item: TokenStream) -> TokenStream {
    let on_host = match options.to_string().as_str() {
        "" => quote::quote! { inline },
        "in_line" => quote::quote! { inline(always) },
        other => {
            let message = format!("`{other}` is no option of #[device]: in_line is the only one");
            return quote::quote! { ::core::compile_error!(#message); }.into();
        }
    };
    let item = stop::with_names(item.into());
    arms::on_both_sides(quote::quote! {
        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        #[cfg_attr(not(target_arch = "nvptx64"), #on_host, track_caller)]
        #item
    })
    .into()
}

/// A loop written out: `unroll!(for i in 0..8 { … })` repeats the body with `i` a constant of 0 to 7.
///
/// The compiler leaves large bodies rolled, and an array indexed by the loop's variable then lives in local
/// memory; written out, every index is a constant and the array stays in registers.
///
/// The range has literal bounds (`0..8`, `0..=7`), or ends in a constant expression with a literal ceiling:
/// `unroll!(for i in 0..N, at_most 16 { … })` repeats the body 16 times, each under `if i < N`, which the
/// compiler decides. The body may not `break` or `continue` this loop. On the host it is a loop: written out,
/// it would only take longer to compile.
#[proc_macro]
pub fn unroll(input: TokenStream) -> TokenStream {
    unroll::expand(input.into()).unwrap_or_else(|error| error.to_compile_error()).into()
}

/// A property test of a kernel: runs what the function returns over drawn shapes and inputs, under the
/// emulator in many orders, on the GPU if there is one, against an oracle and against itself.
///
/// ```ignore
/// #[simt::test]
/// fn scaled(#[draw(sizes(1..=1000))] n: usize, #[draw(array(n, bits()))] x: Vec<f32>) -> simt_test::Trial {
///     /* … */
/// }
/// ```
///
/// Each parameter has `#[draw(SOURCE)]`, which may use the parameters before it. The function returns a
/// `simt_test::Trial`, an `Option` of one, or a `Result`. Options: `cases = N`, `orders = N`, `ptx = IMAGES`,
/// `result`; the crate `simt-test`, which the test's package depends on, says what they are.
#[proc_macro_attribute]
pub fn test(options: TokenStream, item: TokenStream) -> TokenStream {
    test::expand(options.into(), item.into()).unwrap_or_else(|error| error.to_compile_error()).into()
}

/// A line of text from a kernel: `println!("{x} of {}, {:#x}", n, bits)`.
///
/// Inside a `#[kernel]` or a `#[device]` function it is this one without an import; elsewhere in kernel code
/// it is `simt::println!`. The text is a literal; it has up to eight values: numbers (f16 and bf16 too),
/// `bool` and `char`, written as the standard library writes them: `{}`, `{:?}`, `{:x}`, `{:X}`, `{:b}`,
/// `{:o}`, `{:e}`, `{:E}`, with fill, alignment, `+`, `#`, `0`, width and precision. Each call is one line of
/// its own.
///
/// The line goes to the sink of the device, or of the launch, that runs the kernel (`simt::print`). The
/// emulator hands it over when all threads of the block have ended or wait for other blocks, or when
/// thousands of the block's lines wait; a GPU's lines come with a wait for a stream, an event or the
/// device. Lines of different threads have no order; those of one thread keep theirs.
///
/// PTX: three `ld` (of the ring's address, of the lines there may be, of the places asked for) and two `atom`
/// (for a place, for the line's number), and a `st` for each part of the line, the last one `st.release.sys`.
/// A line that finds no room is a `red` that counts it instead, and one that gives back a place asked for.
#[proc_macro]
pub fn println(input: TokenStream) -> TokenStream {
    stopping(print::line(input.into()))
}

fn stopping(expanded: syn::Result<proc_macro2::TokenStream>) -> TokenStream {
    expanded.unwrap_or_else(|error| error.to_compile_error()).into()
}

/// `assert!` on the device: `simt::on_device`.
#[doc(hidden)]
#[proc_macro]
pub fn device_assert(input: TokenStream) -> TokenStream {
    stopping(stop::assert(input.into()))
}

/// `assert_eq!` on the device: `simt::on_device`.
#[doc(hidden)]
#[proc_macro]
pub fn device_assert_eq(input: TokenStream) -> TokenStream {
    stopping(stop::compare(input.into(), quote::quote! { == }))
}

/// `assert_ne!` on the device: `simt::on_device`.
#[doc(hidden)]
#[proc_macro]
pub fn device_assert_ne(input: TokenStream) -> TokenStream {
    stopping(stop::compare(input.into(), quote::quote! { != }))
}

/// `panic!` on the device: `simt::on_device`.
#[doc(hidden)]
#[proc_macro]
pub fn device_panic(input: TokenStream) -> TokenStream {
    stopping(stop::panic(input.into(), "", "explicit panic"))
}

/// `todo!` on the device: `simt::on_device`.
#[doc(hidden)]
#[proc_macro]
pub fn device_todo(input: TokenStream) -> TokenStream {
    stopping(stop::panic(input.into(), "not yet implemented: ", "not yet implemented"))
}

/// `unimplemented!` on the device: `simt::on_device`.
#[doc(hidden)]
#[proc_macro]
pub fn device_unimplemented(input: TokenStream) -> TokenStream {
    stopping(stop::panic(input.into(), "not implemented: ", "not implemented"))
}

/// `unreachable!` on the device: `simt::on_device`.
#[doc(hidden)]
#[proc_macro]
pub fn device_unreachable(input: TokenStream) -> TokenStream {
    let bare = "internal error: entered unreachable code";
    stopping(stop::panic(input.into(), &format!("{bare}: "), bare))
}
