// Compiles a function for several instruction sets; the loader picks the best one for the machine. Only with GCC: the
// kernels are function templates, and clang (seen with 14) rejects target_clones on those: "multiversioned functions do
// not yet support function templates". A clang build uses the instruction set of its flags (CXXFLAGS=-march=...), by
// default baseline x86-64.
//
// Each clone costs build time. Loops that mostly move data have none for AVX-512, because memory bounds them.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define JB_CPU_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define JB_AVX2_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
// A single version for AVX2: call such a function only if HasAvx2(). It names instruction sets and no architecture,
// because GCC inlines no function into one for another architecture.
#define JB_AVX2 __attribute__((target("avx2,fma,bmi,bmi2,f16c,lzcnt,movbe,popcnt")))
#define JB_HAS_AVX2 (__builtin_cpu_supports("x86-64-v3") != 0)
#else
#define JB_CPU_CLONES
#define JB_AVX2_CLONES
#define JB_AVX2
#define JB_HAS_AVX2 true
#endif

namespace jax_baracuda {

inline bool HasAvx2() { return JB_HAS_AVX2; }

}  // namespace jax_baracuda
