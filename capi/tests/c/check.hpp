// What the test programs in C++ share: a check that names the place and stops, and the texts of exceptions.
#ifndef CHECK_HPP
#define CHECK_HPP

#include <cstdlib>
#include <iostream>
#include <paddle_pserver.hpp>
#include <string>

#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) {                                                        \
      std::cerr << __FILE__ << ":" << __LINE__ << ": " #condition << std::endl; \
      std::exit(1);                                                            \
    }                                                                          \
  } while (0)

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
