use std::ffi::{CStr, CString};

use super::*;

/// What a compilation answers: the status, the image and the log.
fn compile(source: &str, name: &str, expressions: &[&str]) -> (c_int, String, String, Vec<String>) {
    let (source, name) = (CString::new(source).unwrap(), CString::new(name).unwrap());
    let expressions: Vec<_> = expressions.iter().map(|one| CString::new(*one).unwrap()).collect();
    let options = [c"--gpu-architecture=compute_90".as_ptr(), c"-DTHREE=3".as_ptr()];
    // SAFETY: all texts end with a zero, and the places are as large as asked for.
    unsafe {
        let mut program = std::ptr::null_mut();
        let none = std::ptr::null();
        assert_eq!(nvrtcCreateProgram(&mut program, source.as_ptr(), name.as_ptr(), 0, none, none), SUCCESS);
        for one in &expressions {
            assert_eq!(nvrtcAddNameExpression(program, one.as_ptr()), SUCCESS);
        }
        let status = nvrtcCompileProgram(program, 2, options.as_ptr());
        let mut size = 0;
        nvrtcGetPTXSize(program, &mut size);
        let mut image = vec![0u8; size];
        nvrtcGetPTX(program, image.as_mut_ptr().cast());
        nvrtcGetProgramLogSize(program, &mut size);
        let mut log = vec![0u8; size];
        nvrtcGetProgramLog(program, log.as_mut_ptr().cast());
        let lowered = expressions.iter().map(|one| {
            let mut name = std::ptr::null();
            match nvrtcGetLoweredName(program, one.as_ptr(), &mut name) {
                SUCCESS => CStr::from_ptr(name).to_string_lossy().into_owned(),
                status => status.to_string(),
            }
        });
        let lowered = lowered.collect();
        assert_eq!(nvrtcDestroyProgram(&mut program), SUCCESS);
        let text = |bytes: Vec<u8>| CString::from_vec_with_nul(bytes).unwrap().into_string().unwrap();
        (status, text(image), text(log), lowered)
    }
}

#[test]
fn a_template_has_a_name_by_its_expression() {
    let source =
        "template <class T> __global__ void fill(T* to, int n) { if (threadIdx.x < n) to[threadIdx.x] = THREE; }";
    let (status, image, log, names) = compile(source, "fill.cu", &["fill<float>", "&fill<int>"]);
    assert_eq!((status, log.as_str()), (SUCCESS, ""));
    let crate::kernels::library::Image::Kernels(kernels) = crate::kernels::library::open(&image).unwrap() else {
        panic!("{image}");
    };
    assert!(names.iter().all(|name| kernels.contains_key(name)), "{names:?} of {:?}", kernels.keys());
    assert_ne!(names[0], names[1]);
    // The same again comes from the cache.
    assert_eq!(compile(source, "fill.cu", &["fill<float>", "&fill<int>"]).1, image);
}

#[test]
fn an_error_is_told_where_it_stands() {
    let (status, image, log, names) = compile("\nextern \"C\" __global__ void f() { no_such(); }", "wrong.cu", &["f"]);
    assert_eq!((status, image.as_str()), (COMPILATION, ""));
    assert!(log.contains("wrong.cu:2:") && log.contains("no_such"), "{log}");
    assert_eq!(names, [NO_LOWERED_NAMES_BEFORE_COMPILATION.to_string()]);
}

#[test]
fn pointers_that_can_not_be_seen_are_refused() {
    let (status, _, log, _) = compile("extern \"C\" __global__ void f(float** all) {}", "pointers.cu", &[]);
    assert!(status == COMPILATION && log.contains("points at pointers"), "{log}");
    let source = "struct Two { float *a, *b; };\nextern \"C\" __global__ void f(Two two) {}";
    let (status, _, log, _) = compile(source, "struct.cu", &[]);
    assert!(status == COMPILATION && log.contains("GPU_DOUBLE_POINTERS"), "{log}");
}
