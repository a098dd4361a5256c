// The test programs in C++ share the check of those in C, and the text of an exception.
#ifndef CHECK_HPP
#define CHECK_HPP

#include <paddle_pserver.hpp>
#include <string>

#include "check.h"

// The text of the exception that a call throws.
template <class Call>
std::string refusal(Call &&call) {
  try {
    call();
  } catch (const pserver::error &failure) {
    return failure.what();
  }
  return "";
}

inline bool has(const std::string &text, const char *words) { return text.find(words) != std::string::npos; }

#endif
