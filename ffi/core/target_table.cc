#include "ffi/core/target_table.h"

namespace jax_baracuda {

std::vector<Target>& TargetTable() {
  static std::vector<Target> table;
  return table;
}

}  // namespace jax_baracuda
