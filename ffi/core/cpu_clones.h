// Compiles a function for several instruction sets; the loader picks the best one for the machine. Only with GCC: the
// kernels are function templates, and clang (seen with 14) rejects target_clones on those: "multiversioned functions do
// not yet support function templates". A clang build uses the instruction set of its flags (CXXFLAGS=-march=...), by
// default baseline x86-64.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define JB_CPU_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
// For rows with too few features to fill AVX-512 vectors.
#define JB_CPU_CLONES_OF_NARROW __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define JB_CPU_CLONES
#define JB_CPU_CLONES_OF_NARROW
#endif
