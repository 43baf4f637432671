// The launchers of write_slice and its gradient. They return launch errors.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "ffi/core/cuda_status.h"
#include "ffi/write_slice/write_slice.h"

namespace jax_baracuda::write_slice {

// How windows are written. Long rows are split among blocks; otherwise each thread has one word or vector.
enum class WriteStrategy {
  kNothing,
  kSmallWindowsOf1Axis,  // the number of axes after ReduceAxes
  kSmallWindowsOf2Axes,
  kSmallWindowsOf3Axes,
  kWords,  // of 16 bytes
  kLongRowsOfWords,
  kVectors,  // aligned vectors of the array; a row may cover only part of a vector
  kLongRowsOfVectors,
  kBits,  // rows begin or end inside bytes
  kLongRowsOfBits,
  kMixed,  // windows have different strategies
};

inline constexpr const char* kWriteStrategyNames[] = {"nothing",
                                                      "small_windows_of_1_axis",
                                                      "small_windows_of_2_axes",
                                                      "small_windows_of_3_axes",
                                                      "words",
                                                      "long_rows_of_words",
                                                      "vectors",
                                                      "long_rows_of_vectors",
                                                      "bits",
                                                      "long_rows_of_bits",
                                                      "mixed"};

// How windows are taken out: the word size.
enum class TakeStrategy {
  kNothing,
  kWordsOf1Byte,
  kWordsOf2Bytes,
  kWordsOf4Bytes,
  kWordsOf8Bytes,
  kWordsOf16Bytes,
  kLongRowsOf1Byte,
  kLongRowsOf2Bytes,
  kLongRowsOf4Bytes,
  kLongRowsOf8Bytes,
  kLongRowsOf16Bytes,
  kMixed,  // windows have different strategies
};

inline constexpr const char* kTakeStrategyNames[] = {"nothing",
                                                     "words_of_1_byte",
                                                     "words_of_2_bytes",
                                                     "words_of_4_bytes",
                                                     "words_of_8_bytes",
                                                     "words_of_16_bytes",
                                                     "long_rows_of_1_byte_words",
                                                     "long_rows_of_2_byte_words",
                                                     "long_rows_of_4_byte_words",
                                                     "long_rows_of_8_byte_words",
                                                     "long_rows_of_16_byte_words",
                                                     "mixed"};

WriteStrategy ChooseWrite(const std::vector<Update>& updates);
TakeStrategy ChooseTake(const std::vector<Update>& updates);

// Writes the windows' contents into their arrays.
CudaStatus LaunchWrite(const std::vector<Update>& updates, cudaStream_t stream);

// Moves the windows' contents out of their arrays and leaves zeros there. Content outside an array is zero. Not
// supported if rows begin or end inside bytes.
CudaStatus LaunchTake(const std::vector<Update>& updates, cudaStream_t stream);

}  // namespace jax_baracuda::write_slice
