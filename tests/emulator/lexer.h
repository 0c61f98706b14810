// PTX text as a sequence of tokens.
#pragma once

#include <string>
#include <string_view>

namespace emulator {

struct Token {
  enum class Kind { kWord, kNumber, kString, kPunctuation, kEnd };
  Kind kind = Kind::kEnd;
  std::string_view text;
  int line = 0;

  bool is(std::string_view wanted) const { return text == wanted && kind != Kind::kString; }
};

// Words are names, opcodes with their modifiers ("ld.global.v2.f32", "%tid.x") and directives
// (".reg"); punctuation is one character each.
class Lexer {
 public:
  explicit Lexer(std::string_view text) : rest_(text) { advance(); }
  const Token& peek() const { return next_; }
  Token take();
  bool take_if(std::string_view text);
  void expect(std::string_view text);
  // Skips what is left of the line of the last token taken.
  void skip_line();
  // Skips to behind the `}` that belongs to the next `{`.
  void skip_braces();
  [[noreturn]] void fail(const std::string& what) const;

 private:
  void advance();
  void skip_space();

  std::string_view rest_;
  int line_ = 1;
  int last_line_ = 1;
  Token next_;
};

}  // namespace emulator
