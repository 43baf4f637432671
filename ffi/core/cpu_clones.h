// Compiles a function for several instruction sets and lets the loader pick the best one for the machine. By GCC alone:
// clang (seen with 14) refuses target_clones on function templates, which the kernels are: "multiversioned functions do
// not yet support function templates". Built by clang, they have the instructions that its flags allow
// (CXXFLAGS=-march=...), else those of every x86-64.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define JB_CPU_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
// For rows of so few features that longer vectors would stay empty.
#define JB_CPU_CLONES_OF_NARROW __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define JB_CPU_CLONES
#define JB_CPU_CLONES_OF_NARROW
#endif
