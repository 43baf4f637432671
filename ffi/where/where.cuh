// Launchers of the CUDA kernels of where and its gradient, callable from plain C++.
//
// They only enqueue work on `stream`: no allocation, no synchronisation, and equal problems make equal launches. They
// write every element of every result, including empty sums.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/core/cuda_status.h"
#include "ffi/where/where.h"

namespace jax_baracuda::where {

// How operands are read. With a tail, the size is not a multiple of the vector width, and the last elements are
// processed one by one.
#define JB_WITH_TAIL(name) name, name "_with_tail"

enum class SelectStrategy {
  kNothing,
  kByElement,  // any operands
  // By vectors, named after the operands whose shape differs from the output's:
  kDense,
  kDenseWithTail,
  kScalarA,
  kScalarAWithTail,
  kScalarB,
  kScalarBWithTail,
  kRepeatedCond,
  kRepeatedCondWithTail,
  kScalarBRepeatedCond,
  kScalarBRepeatedCondWithTail,
  kRepeated,  // any operands
  kRepeatedWithTail,
};

inline constexpr const char* kSelectStrategyNames[] = {"nothing",
                                                       "by_element",
                                                       JB_WITH_TAIL("dense"),
                                                       JB_WITH_TAIL("scalar_a"),
                                                       JB_WITH_TAIL("scalar_b"),
                                                       JB_WITH_TAIL("repeated_cond"),
                                                       JB_WITH_TAIL("scalar_b_repeated_cond"),
                                                       JB_WITH_TAIL("repeated")};

enum class SplitStrategy {
  kNothing,
  kByElement,
  kDense,  // the condition
  kDenseWithTail,
  kRepeated,  // the condition
  kRepeatedWithTail,
  // Sums of contiguous numbers, of several short rows per step, or of one long row per step. "InParts": the rows are
  // split into parts, and a second kernel adds up the partial sums.
  kSumNumbers,
  kSumNumbersInParts,
  kSumNumbersWithTail,
  kSumNumbersWithTailInParts,
  kSumNumbersByElement,
  kSumNumbersByElementInParts,
  kSumShortRows,
  kSumShortRowsInParts,
  kSumShortRowsWithTail,
  kSumShortRowsWithTailInParts,
  kSumShortRowsByElement,
  kSumShortRowsByElementInParts,
  kSumLongRows,
  kSumLongRowsInParts,
  kSumLongRowsByElement,
  kSumLongRowsByElementInParts,
};

#define JB_IN_PARTS(name) name, name "_in_parts"

inline constexpr const char* kSplitStrategyNames[] = {"nothing",
                                                      "by_element",
                                                      JB_WITH_TAIL("dense"),
                                                      JB_WITH_TAIL("repeated"),
                                                      JB_IN_PARTS("sum_numbers"),
                                                      JB_IN_PARTS("sum_numbers_with_tail"),
                                                      JB_IN_PARTS("sum_numbers_by_element"),
                                                      JB_IN_PARTS("sum_short_rows"),
                                                      JB_IN_PARTS("sum_short_rows_with_tail"),
                                                      JB_IN_PARTS("sum_short_rows_by_element"),
                                                      JB_IN_PARTS("sum_long_rows"),
                                                      JB_IN_PARTS("sum_long_rows_by_element")};

#undef JB_IN_PARTS
#undef JB_WITH_TAIL

// `are_aligned`: whether all arrays are aligned to vectors. These call no CUDA function.
SelectStrategy ChooseStrategy(const SelectCall& call, bool are_aligned = true);
SplitStrategy ChooseStrategy(const SplitCall& call, bool are_aligned = true);

CudaStatus LaunchSelect(const SelectCall& call, cudaStream_t stream);

CudaStatus LaunchSplit(const SplitCall& call, cudaStream_t stream);

// Bytes of scratch memory that LaunchSplit needs for sums; calls no CUDA function.
int64_t SumScratchBytes(const Sum& sum, int64_t element_bytes, int num_sums);

// The implementation of ChooseStrategy and LaunchSplit for calls with sums.
SplitStrategy ChooseSumStrategy(const SplitCall& call, bool are_aligned);
CudaStatus LaunchSums(const SplitCall& call, cudaStream_t stream);

}  // namespace jax_baracuda::where
