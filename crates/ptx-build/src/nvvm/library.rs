//! libNVVM: where it lies, and the calls of its C interface that are needed.
//!
//! It is loaded when it is asked for, and never linked: a build without it is a build for the other
//! generator.

use super::NvvmError;
use std::env;
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Names a libNVVM to use, the file.
pub const LIBRARY_ENV: &str = "FERROKV_LIBNVVM";

/// How to get libNVVM.
pub const REMEDY: &str = "run ./setup --nvvm, or set CUDA_HOME to a CUDA toolkit (13.3 or newer)";

/// The reason of [`NvvmError::NoLibrary`] where there is no file that could be one.
pub const NONE: &str = "no libnvvm.so";

/// Its place under the folder of the workspace, filled by `./setup --nvvm`.
const OWN: &str = ".ferrokv/tools/nvvm/libnvvm.so.4";

/// Its names inside a toolkit's folder.
const TOOLKIT: [&str; 2] = ["nvvm/lib64/libnvvm.so", "nvvm/lib64/libnvvm.so.4"];

/// The oldest release that reads the IR of the device compiler.
const OLDEST: (u32, u32) = (13, 3);

/// What every module is compiled with: nothing that changes a bit. Multiplications and additions stay apart,
/// subnormals stay, division and square root are rounded to nearest.
pub(super) const OPTIONS: [&str; 5] = ["-opt=3", "-fma=0", "-ftz=0", "-prec-div=1", "-prec-sqrt=1"];

/// A module with a kernel that is one barrier, to learn what a library is: older ones make a call of it, to
/// nowhere.
const PROBE: &str = concat!(
    "target datalayout = \"e-p:64:64:64-i1:8:8-i8:8:8-i16:16:16-i32:32:32-i64:64:64-i128:128:128-f32:32:32-\
     f64:64:64-v16:16:16-v32:32:32-v64:64:64-v128:128:128-n16:32:64\"\n",
    "target triple = \"nvptx64-nvidia-cuda\"\n",
    "declare void @llvm.nvvm.barrier.cta.sync.aligned.all(i32)\n",
    "define ptx_kernel void @probe() {\n",
    "  call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)\n  ret void\n}\n",
    "!nvvmir.version = !{!0}\n!0 = !{i32 2, i32 0, i32 3, i32 2}\n",
);

type Program = *mut c_void;

/// The functions of libNVVM that are used, with the types of its header.
#[derive(Clone, Copy)]
struct Calls {
    create: unsafe extern "C" fn(*mut Program) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    add: unsafe extern "C" fn(Program, *const c_char, usize, *const c_char) -> c_int,
    verify: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    result_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    result: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
}

/// A libNVVM that works. Threads may share it: NVIDIA documents libNVVM's API as thread-safe, and each
/// program here is of one call of [`compile`](Library::compile).
pub struct Library {
    calls: Calls,
    located: Located,
    /// The calls lead into it.
    _loaded: libloading::Library,
}

/// Which libNVVM that is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// The file.
    pub path: PathBuf,
    /// The release of its toolkit, for example `13.0.88`.
    pub release: String,
    /// The file's size in bytes, and when it was last changed: tells files of one release apart.
    pub stamp: String,
}

/// PTX, and what was said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// The PTX.
    pub ptx: String,
    /// Warnings; mostly empty.
    pub messages: String,
}

/// Looks for libNVVM: [`LIBRARY_ENV`], what `./setup --nvvm` put under `workspace`, the toolkit that
/// `CUDA_HOME` names, `/usr/local/cuda`. The first that compiles a small kernel and is new enough is taken.
///
/// # Errors
/// [`NvvmError::NoLibrary`], with a reason for each that was found.
pub fn find(workspace: &Path) -> Result<Library, NvvmError> {
    let named = env::var_os(LIBRARY_ENV).filter(|value| !value.is_empty());
    if let Some(named) = named {
        return Library::open(Path::new(&named)).map_err(|reason| NvvmError::NoLibrary {
            reason: format!("{LIBRARY_ENV}: {reason}; correct or unset it"),
        });
    }
    let home = env::var_os("CUDA_HOME").filter(|value| !value.is_empty()).map(PathBuf::from);
    let toolkits = home.into_iter().chain([PathBuf::from("/usr/local/cuda")]);
    let candidates = [workspace.join(OWN)]
        .into_iter()
        .chain(toolkits.flat_map(|folder| TOOLKIT.map(|name| folder.join(name))))
        .filter(|path| path.is_file());
    let mut reasons = Vec::new();
    for path in candidates {
        match Library::open(&path) {
            Ok(library) => return Ok(library),
            Err(reason) => reasons.push(reason),
        }
    }
    if reasons.is_empty() {
        reasons.push(NONE.into());
    }
    Err(NvvmError::NoLibrary { reason: reasons.join("; ") })
}

impl Library {
    /// Loads the library at `path`.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn open(path: &Path) -> Result<Library, String> {
        let at = path.display();
        // SAFETY: the file is a libNVVM by its name or by the user's word; loading it runs its initialisers.
        let loaded = unsafe { libloading::Library::new(path) }.map_err(|error| format!("{at}: {error}"))?;
        let calls = calls_of(&loaded).map_err(|error| format!("{at}: {error}"))?;
        let located = Located { path: path.to_owned(), release: String::new(), stamp: stamp(path) };
        let mut library = Library { calls, located, _loaded: loaded };
        let probe = library.compile(PROBE, super::MODERN).map_err(|error| {
            let reason = error.to_string();
            format!("{at} compiles no small kernel: {}", reason.lines().last().unwrap_or_default())
        })?;
        let release =
            release_in(&probe.ptx).ok_or_else(|| format!("{at} does not tell its release in the PTX"))?;
        let mut numbers = release.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
        if (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < OLDEST {
            return Err(format!("{at} is release {release}, older than {}.{}", OLDEST.0, OLDEST.1));
        }
        if !probe.ptx.contains("bar.sync") {
            return Err(format!(
                "{at}, release {release}, does not know the barriers of the device compiler"
            ));
        }
        library.located.release = release.to_owned();
        Ok(library)
    }

    /// Which one it is.
    pub fn located(&self) -> &Located {
        &self.located
    }

    /// Compiles NVVM IR for `compute_SM`.
    ///
    /// # Errors
    /// [`NvvmError::Library`] with what it said.
    pub fn compile(&self, ir: &str, sm: u32) -> Result<Compiled, NvvmError> {
        let arch = format!("compute_{sm}");
        let texts: Vec<CString> = OPTIONS
            .into_iter()
            .map(str::to_owned)
            .chain([format!("-arch={arch}")])
            .filter_map(|option| CString::new(option).ok())
            .collect();
        let options: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is valid for a write. Other threads may compile meanwhile: the API is documented as
        // thread-safe, and what follows is of this thread's program alone.
        let code = unsafe { (self.calls.create)(&mut raw) };
        let mut program = Guard { calls: self.calls, raw };
        let failed = |program: &Guard, call: &'static str, code: c_int| NvvmError::Library {
            library: self.located.path.clone(),
            call,
            code,
            arch: arch.clone(),
            messages: program.log(),
        };
        if code != 0 {
            program.raw = std::ptr::null_mut();
            return Err(failed(&program, "nvvmCreateProgram", code));
        }
        // SAFETY: the program lives, the text is as long as is said, the name ends in NUL; both are copied.
        let code =
            unsafe { (self.calls.add)(program.raw, ir.as_ptr().cast(), ir.len(), c"kernels".as_ptr()) };
        if code != 0 {
            return Err(failed(&program, "nvvmAddModuleToProgram", code));
        }
        let count = options.len() as c_int;
        // SAFETY: the program lives and is this thread's, and so many pointers to strings that end in NUL lie
        // there.
        let code = unsafe { (self.calls.verify)(program.raw, count, options.as_ptr()) };
        if code != 0 {
            return Err(failed(&program, "nvvmVerifyProgram", code));
        }
        // SAFETY: as above.
        let code = unsafe { (self.calls.compile)(program.raw, count, options.as_ptr()) };
        if code != 0 {
            return Err(failed(&program, "nvvmCompileProgram", code));
        }
        let ptx = program
            .text(self.calls.result_size, self.calls.result)
            .map_err(|code| failed(&program, "nvvmGetCompiledResult", code))?;
        Ok(Compiled { ptx, messages: program.log() })
    }
}

/// A program of libNVVM's, destroyed when it goes; none if null.
struct Guard {
    calls: Calls,
    raw: Program,
}

impl Guard {
    /// A text whose size, with the NUL behind it, one call tells and which another writes.
    fn text(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        text: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<String, c_int> {
        let mut bytes = 0;
        // SAFETY: the program lives and `bytes` is valid for a write.
        let code = unsafe { size(self.raw, &mut bytes) };
        if code != 0 {
            return Err(code);
        }
        let mut buffer = vec![0u8; bytes];
        if bytes > 0 {
            // SAFETY: the buffer has the room that was asked for.
            let code = unsafe { text(self.raw, buffer.as_mut_ptr().cast()) };
            if code != 0 {
                return Err(code);
            }
        }
        let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(buffer.len());
        Ok(String::from_utf8_lossy(&buffer[..end]).into_owned())
    }

    fn log(&self) -> String {
        if self.raw.is_null() {
            return String::new();
        }
        self.text(self.calls.log_size, self.calls.log).unwrap_or_default().trim().to_owned()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: the program was made by this library, is this thread's and is not used again.
            unsafe { (self.calls.destroy)(&mut self.raw) };
        }
    }
}

fn calls_of(library: &libloading::Library) -> Result<Calls, libloading::Error> {
    // SAFETY: each function has the type that nvvm.h declares it with, since its first release.
    unsafe {
        Ok(Calls {
            create: *library.get(b"nvvmCreateProgram\0")?,
            destroy: *library.get(b"nvvmDestroyProgram\0")?,
            add: *library.get(b"nvvmAddModuleToProgram\0")?,
            verify: *library.get(b"nvvmVerifyProgram\0")?,
            compile: *library.get(b"nvvmCompileProgram\0")?,
            result_size: *library.get(b"nvvmGetCompiledResultSize\0")?,
            result: *library.get(b"nvvmGetCompiledResult\0")?,
            log_size: *library.get(b"nvvmGetProgramLogSize\0")?,
            log: *library.get(b"nvvmGetProgramLog\0")?,
        })
    }
}

/// The size of a file, and when it was changed, in nanoseconds since 1970.
fn stamp(path: &Path) -> String {
    let Ok(file) = std::fs::metadata(path) else { return String::new() };
    let changed = file.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    format!("{} {}", file.len(), changed.map_or(0, |time| time.as_nanos()))
}

/// `// Cuda compilation tools, release 13.0, V13.0.88`.
fn release_in(ptx: &str) -> Option<&str> {
    let line = ptx.lines().find(|line| line.contains("release "))?;
    line.rsplit_once(", V").map(|(_, release)| release.trim()).filter(|release| !release.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_read_from_the_header() {
        let header = "//\n// Generated by NVIDIA NVVM Compiler\n//\n// Cuda compilation tools, release 13.0, V13.0.88\n";
        assert_eq!(release_in(header), Some("13.0.88"));
        assert_eq!(release_in("// release, V\n.version 9.0\n"), None);
    }

    #[test]
    fn a_changed_file_has_another_stamp() {
        let path = env::temp_dir().join(format!("ptx-build-stamp-{}", std::process::id()));
        std::fs::write(&path, "one").unwrap();
        let one = stamp(&path);
        std::fs::write(&path, "three").unwrap();
        let three = stamp(&path);
        std::fs::remove_file(&path).unwrap();
        assert!(one.starts_with("3 ") && three.starts_with("5 "), "{one}, {three}");
    }

    #[test]
    fn a_file_that_is_no_library_is_refused_by_name() {
        let reason = Library::open(Path::new("/nonexistent/libnvvm.so")).err().unwrap();
        assert!(reason.starts_with("/nonexistent/libnvvm.so: "), "{reason}");
        let program = env::current_exe().unwrap();
        let reason = Library::open(&program).err().unwrap();
        assert!(reason.starts_with(&program.display().to_string()), "{reason}");
    }

    #[test]
    fn no_library_says_how_to_get_one() {
        let text = NvvmError::NoLibrary { reason: "no libnvvm.so".into() }.to_string();
        assert!(text.contains("no libnvvm.so; run ./setup --nvvm, or set CUDA_HOME"), "{text}");
        assert!(text.contains("FERROKV_CODEGEN=llvm"), "{text}");
    }
}
