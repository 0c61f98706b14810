// PTX text as a sequence of tokens.
#include "lexer.h"

#include <cctype>

#include "machine.h"

namespace emulator {
namespace {

bool begins_word(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' ||
         c == '.';
}
bool in_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '.' ||
         c == '%';
}

size_t word_length(std::string_view text) {
  size_t n = 1;
  while (n < text.size()) {
    if (in_word(text[n])) {
      ++n;
    } else if (text.substr(n, 2) == "::") {
      n += 2;
    } else {
      break;
    }
  }
  return n;
}

}  // namespace

Token Lexer::take() {
  Token token = next_;
  last_line_ = token.line;
  advance();
  return token;
}

bool Lexer::take_if(std::string_view text) {
  if (!next_.is(text)) return false;
  take();
  return true;
}

void Lexer::expect(std::string_view text) {
  if (!take_if(text)) {
    fail("expected '" + std::string(text) + "', found '" + std::string(next_.text) + "'");
  }
}

void Lexer::skip_line() {
  while (next_.kind != Token::Kind::kEnd && next_.line == last_line_) advance();
}

void Lexer::skip_braces() {
  int depth = 0;
  while (next_.kind != Token::Kind::kEnd) {
    const Token token = take();
    if (token.is("{")) ++depth;
    if (token.is("}") && --depth == 0) return;
  }
}

void Lexer::fail(const std::string& what) const {
  throw Failure("PTX line " + std::to_string(next_.line) + ": " + what);
}

void Lexer::skip_space() {
  while (!rest_.empty()) {
    if (rest_[0] == '\n') ++line_;
    if (std::isspace(static_cast<unsigned char>(rest_[0]))) {
      rest_.remove_prefix(1);
    } else if (rest_.substr(0, 2) == "//") {
      rest_.remove_prefix(std::min(rest_.find('\n'), rest_.size()));
    } else if (rest_.substr(0, 2) == "/*") {
      const size_t end = std::min(rest_.find("*/"), rest_.size() - 2) + 2;
      for (char c : rest_.substr(0, end)) line_ += c == '\n';
      rest_.remove_prefix(end);
    } else {
      break;
    }
  }
}

void Lexer::advance() {
  skip_space();
  next_ = Token{Token::Kind::kEnd, {}, line_};
  if (rest_.empty()) return;
  const char c = rest_[0];
  size_t length = 1;
  if (c == '"') {
    next_.kind = Token::Kind::kString;
    length = std::min(rest_.find('"', 1), rest_.size() - 1) + 1;
    next_.text = rest_.substr(1, length - 2);
  } else if (std::isdigit(static_cast<unsigned char>(c)) ||
             (c == '-' && rest_.size() > 1 && std::isdigit(static_cast<unsigned char>(rest_[1])))) {
    next_.kind = Token::Kind::kNumber;
    while (length < rest_.size() &&
           (std::isalnum(static_cast<unsigned char>(rest_[length])) || rest_[length] == '.'))
      ++length;
    next_.text = rest_.substr(0, length);
  } else if (begins_word(c)) {
    next_.kind = Token::Kind::kWord;
    length = word_length(rest_);
    next_.text = rest_.substr(0, length);
  } else {
    next_.kind = Token::Kind::kPunctuation;
    next_.text = rest_.substr(0, 1);
  }
  rest_.remove_prefix(length);
}

}  // namespace emulator
