// What the CUDA handlers of the segment ops share.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_handler.h"
#include "ffi/core/target_table.h"
#include "ffi/segment/segment_handler.h"

namespace jax_baracuda::segment {

// The parameters that jax_baracuda/ops/segment.py passes when it lowers an op with scratch memory.
struct ScratchRequest {
  explicit ScratchRequest(const ScratchParameters& parameters)
      : element_bytes(parameters.at("element_bytes")),
        indices_are_sorted(parameters.at("indices_are_sorted") != 0),
        deterministic(parameters.at("deterministic") != 0) {
    problem.batch = parameters.at("batch");
    problem.rows = parameters.at("rows");
    problem.segments = parameters.at("segments");
    problem.features = parameters.at("features");
    problem.data_is_shared = parameters.at("data_is_shared") != 0;
    problem.ids_are_shared = parameters.at("ids_are_shared") != 0;
  }

  Problem problem;
  int64_t element_bytes;
  bool indices_are_sorted;
  bool deterministic;
};

inline int64_t ElementBytes(const ffi::AnyBuffer& buffer) {
  return static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
}

}  // namespace jax_baracuda::segment
