// A reference to a callable, for functions that should be compiled once rather than once per callable.
#pragma once

#include <type_traits>
#include <utility>

namespace jax_baracuda {

template <typename Signature>
class FunctionRef;

// Valid only while the callable lives. Use it as a parameter; do not store it beyond the call.
template <typename Result, typename... Arguments>
class FunctionRef<Result(Arguments...)> {
 public:
  template <typename Body, typename = std::enable_if_t<!std::is_same_v<Body, FunctionRef>>>
  FunctionRef(const Body& body)
      : body_(&body), call_([](const void* erased, Arguments... arguments) -> Result {
          return (*static_cast<const Body*>(erased))(std::forward<Arguments>(arguments)...);
        }) {}

  Result operator()(Arguments... arguments) const { return call_(body_, std::forward<Arguments>(arguments)...); }

 private:
  const void* body_;
  Result (*call_)(const void*, Arguments...);
};

}  // namespace jax_baracuda
