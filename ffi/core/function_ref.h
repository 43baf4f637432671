// A reference to something callable, as an argument of functions that are worth compiling once for all of them.
#pragma once

#include <type_traits>
#include <utility>

namespace jax_baracuda {

template <typename Signature>
class FunctionRef;

// Valid as long as what it refers to: an argument, not to be kept.
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
