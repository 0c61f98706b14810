// From PTX text to variables, functions and statements.
#include <algorithm>
#include <bit>
#include <charconv>
#include <unordered_map>

#include "lexer.h"
#include "text.h"

namespace emulator {
namespace {

// Bytes of an element of a type: ".b32" -> 4, ".f16x2" -> 4, ".pred" -> 0.
int type_bytes(std::string_view type) {
  static const std::unordered_map<std::string_view, int> sizes{
      {".pred", 0}, {".b8", 1},  {".u8", 1},  {".s8", 1},    {".b16", 2},
      {".u16", 2},  {".s16", 2}, {".f16", 2}, {".bf16", 2},  {".b32", 4},
      {".u32", 4},  {".s32", 4}, {".f32", 4}, {".f16x2", 4}, {".bf16x2", 4},
      {".b64", 8},  {".u64", 8}, {".s64", 8}, {".f64", 8},   {".b128", 16}};
  const auto found = sizes.find(type);
  return found == sizes.end() ? -1 : found->second;
}

struct Number {
  uint64_t bits = 0;
  Operand::Literal literal = Operand::Literal::kInteger;
};

Number to_number(std::string_view text, const Lexer& lexer) {
  const std::string all(text);
  try {
    if (all.starts_with("0f") || all.starts_with("0F"))
      return {std::stoull(all.substr(2), nullptr, 16), Operand::Literal::kFloat32};
    if (all.starts_with("0d") || all.starts_with("0D"))
      return {std::stoull(all.substr(2), nullptr, 16), Operand::Literal::kFloat64};
    if (all.starts_with("0b") || all.starts_with("0B"))
      return {std::stoull(all.substr(2), nullptr, 2)};
    if (all.find('.') != std::string::npos)
      return {std::bit_cast<uint64_t>(std::stod(all)), Operand::Literal::kFloat64};
    if (all[0] == '-') return {static_cast<uint64_t>(std::stoll(all, nullptr, 0))};
    return {std::stoull(all, nullptr, 0)};
  } catch (const std::exception&) {
    lexer.fail("'" + all + "' is not a number");
  }
}

void append_bytes(std::vector<uint8_t>& to, Number number, int bytes) {
  if (number.literal == Operand::Literal::kFloat64 && bytes == 4) {
    number.bits = std::bit_cast<uint32_t>(static_cast<float>(std::bit_cast<double>(number.bits)));
  }
  for (int i = 0; i < bytes; ++i) to.push_back(static_cast<uint8_t>(number.bits >> 8 * i));
}

class Parser {
 public:
  explicit Parser(std::string_view ptx) : lexer_(ptx) {}

  Text parse() {
    while (lexer_.peek().kind != Token::Kind::kEnd) top_level();
    return std::move(text_);
  }

 private:
  // What a pair of braces declares.
  struct Scope {
    int parent = -1;
    std::unordered_map<std::string, int> registers, variables, labels;
    // `.reg .b32 %r<100>` by its stem: from which number on, and how many.
    std::unordered_map<std::string, std::pair<int, int>> ranges;
  };

  void top_level() {
    const Token token = lexer_.peek();
    if (token.is(".version") || token.is(".target") || token.is(".address_size")) {
      lexer_.take();
      lexer_.skip_line();
    } else if (token.is(".file")) {
      lexer_.take();
      const Token number = lexer_.take();
      text_.files[std::stoi(std::string(number.text))] = lexer_.take().text;
      lexer_.skip_line();
    } else if (token.is(".section")) {
      lexer_.skip_braces();
    } else if (token.is(".extern") || token.is(".visible") || token.is(".weak") ||
               token.is(".common")) {
      extern_ = token.is(".extern");
      lexer_.take();
    } else if (token.is(".entry") || token.is(".func")) {
      function();
      extern_ = false;
    } else if (token.is(".global") || token.is(".shared") || token.is(".const")) {
      for (Variable& variable : variables()) text_.variables[variable.name] = variable;
      lexer_.expect(";");
      extern_ = false;
    } else if (token.is(".pragma") || token.is(".alias")) {
      skip_to_semicolon();
    } else {
      lexer_.fail("'" + std::string(token.text) + "' was not expected here");
    }
  }

  void skip_to_semicolon() {
    while (!lexer_.take_if(";")) {
      if (lexer_.take().kind == Token::Kind::kEnd) lexer_.fail("the text ends within a statement");
    }
  }

  // `.space .align n .vn .type name[n][m] = {…}, name…`, without what ends it.
  std::vector<Variable> variables() {
    Variable common;
    const Token space = lexer_.take();
    common.space = space.is(".shared")  ? Space::kShared
                   : space.is(".const") ? Space::kConst
                   : space.is(".local") ? Space::kLocal
                   : space.is(".param") ? Space::kParam
                                        : Space::kGlobal;
    int element = 1, vector = 1;
    size_t alignment = 0;
    bool pointer = false;
    while (lexer_.peek().text.starts_with(".")) {
      const Token word = lexer_.take();
      if (word.is(".align")) {
        const size_t stated = to_number(lexer_.take().text, lexer_).bits;
        if (!pointer) alignment = stated;
      } else if (word.is(".v2") || word.is(".v4")) {
        vector = word.text[2] - '0';
      } else if (word.is(".ptr")) {
        pointer = true;  // what follows is about the memory that a parameter points to
      } else if (pointer && type_bytes(word.text) < 0) {
        continue;
      } else if ((element = type_bytes(word.text)) < 1) {
        lexer_.fail("'" + std::string(word.text) + "' is not a known type");
      }
    }
    common.alignment = alignment ? alignment : element * vector;
    std::vector<Variable> all;
    do {
      Variable variable = common;
      variable.name = lexer_.take().text;
      size_t count = 1;
      while (lexer_.take_if("[")) {
        if (lexer_.peek().is("]")) {
          variable.dynamic = true;
          count = 0;
        } else {
          count *= to_number(lexer_.take().text, lexer_).bits;
        }
        lexer_.expect("]");
      }
      variable.bytes = count * element * vector;
      if (lexer_.take_if("=")) initial_value(variable, element);
      all.push_back(std::move(variable));
    } while (common.space != Space::kParam && lexer_.take_if(","));
    return all;
  }

  void initial_value(Variable& variable, int element) {
    if (lexer_.take_if("{")) {
      while (!lexer_.take_if("}")) {
        if (!lexer_.take_if(",")) initial_value(variable, element);
      }
      return;
    }
    const Token token = lexer_.take();
    if (token.kind != Token::Kind::kNumber)
      lexer_.fail("addresses as initial values are not known here");
    append_bytes(variable.initial, to_number(token.text, lexer_), element);
  }

  void function() {
    Function function;
    function.entry = lexer_.take().is(".entry");
    function_ = &function;
    scopes_.assign(1, Scope{});
    scope_of_statement_.clear();
    scope_ = 0;
    if (!function.entry && lexer_.peek().is("(")) parameters();
    function.name = lexer_.take().text;
    if (lexer_.peek().is("(")) parameters();
    while (!lexer_.peek().is("{") && !lexer_.peek().is(";")) {
      const Token token = lexer_.take();
      if (token.is(".reqnctapercluster")) {
        function.has_cluster = true;
        for (int axis = 0; axis < 3; ++axis) {
          function.cluster[axis] = to_number(lexer_.take().text, lexer_).bits;
          if (!lexer_.take_if(",")) break;
        }
      }
    }
    if (!lexer_.take_if(";")) {
      function.defined = true;
      body();
    }
    Function& known = text_.functions[function.name];
    if (function.defined || !known.defined) known = std::move(function);
  }

  void parameters() {
    lexer_.expect("(");
    while (!lexer_.take_if(")")) {
      for (Variable& variable : variables()) {
        variable.of_entry = function_->entry;
        function_->parameters.push_back(declare(std::move(variable)));
      }
      lexer_.take_if(",");
    }
  }

  int declare(Variable variable) {
    const int number = static_cast<int>(function_->variables.size());
    scopes_[scope_].variables[variable.name] = number;
    function_->variables.push_back(std::move(variable));
    return number;
  }

  void body() {
    lexer_.expect("{");
    int depth = 1;
    source_ = nullptr;
    while (depth > 0) {
      const Token token = lexer_.peek();
      if (token.kind == Token::Kind::kEnd) lexer_.fail("the text ends within a function");
      if (token.is("{")) {
        lexer_.take();
        scopes_.push_back(Scope{scope_, {}, {}, {}, {}});
        scope_ = static_cast<int>(scopes_.size()) - 1;
        ++depth;
      } else if (token.is("}")) {
        lexer_.take();
        scope_ = scopes_[scope_].parent;
        --depth;
      } else if (token.is(".loc")) {
        lexer_.take();
        source_ = &text_.files[std::stoi(std::string(lexer_.take().text))];
        source_line_ = std::stoi(std::string(lexer_.take().text));
        lexer_.skip_line();
      } else if (token.is(".reg")) {
        registers();
      } else if (token.is(".local") || token.is(".shared") || token.is(".param") ||
                 token.is(".global") || token.is(".const")) {
        for (Variable& variable : variables()) declare(std::move(variable));
        lexer_.expect(";");
      } else if (token.is(".pragma")) {
        lexer_.take();
        const std::string words(lexer_.peek().text);
        constexpr std::string_view kUsed = "used_bytes_mask ";
        if (words.starts_with(kUsed))
          used_bytes_ = std::stoull(words.substr(kUsed.size()), nullptr, 0);
        skip_to_semicolon();
      } else {
        label_or_statement();
      }
    }
    resolve_labels();
  }

  void registers() {
    lexer_.take();
    int bytes = -1;
    while (lexer_.peek().text.starts_with(".")) bytes = type_bytes(lexer_.take().text);
    if (bytes < 0) lexer_.fail("a register of a type that is not known");
    do {
      std::string name(lexer_.take().text);
      const int first = static_cast<int>(function_->registers.size());
      int count = 1;
      if (lexer_.take_if("<")) {
        count = static_cast<int>(to_number(lexer_.take().text, lexer_).bits);
        lexer_.expect(">");
        scopes_[scope_].ranges[name] = {first, count};
      } else {
        scopes_[scope_].registers[name] = first;
      }
      function_->registers.resize(first + count, Register{bytes});
    } while (lexer_.take_if(","));
    lexer_.expect(";");
  }

  void label_or_statement() {
    Statement statement;
    statement.line = lexer_.peek().line;
    statement.source = source_;
    statement.source_line = source_line_;
    statement.used_bytes = std::exchange(used_bytes_, ~uint64_t{0});
    if (lexer_.take_if("@")) {
      const bool negated = lexer_.take_if("!");
      statement.guard = operand("");
      if (statement.guard.kind != Operand::Kind::kPredicate)
        lexer_.fail("a guard has to be a predicate");
      statement.guard.negated = negated;
    }
    const Token word = lexer_.take();
    if (word.kind != Token::Kind::kWord)
      lexer_.fail("expected an instruction, found '" + std::string(word.text) + "'");
    if (lexer_.take_if(":")) {
      scopes_[scope_].labels[std::string(word.text)] = static_cast<int>(function_->labels.size());
      function_->labels.push_back(function_->statements.size());
      return;
    }
    statement.opcode = word.text;
    for (size_t begin = 0; begin <= word.text.size();) {
      const size_t end = std::min(word.text.find('.', begin), word.text.size());
      statement.parts.emplace_back(word.text.substr(begin, end - begin));
      begin = end + 1;
    }
    while (!lexer_.take_if(";")) {
      if (!lexer_.take_if(",")) statement.operands.push_back(operand(statement.parts[0]));
    }
    function_->statements.push_back(std::move(statement));
    scope_of_statement_.resize(function_->statements.size());
    scope_of_statement_.back() = scope_;
  }

  Operand operand(const std::string& opcode) {
    Operand first = single_operand(opcode);
    if (!lexer_.take_if("|")) return first;
    Operand pair;
    pair.kind = Operand::Kind::kPair;
    pair.parts.push_back(std::move(first));
    pair.parts.push_back(single_operand(opcode));
    return pair;
  }

  Operand single_operand(const std::string& opcode) {
    Operand result;
    const Token token = lexer_.take();
    if (token.is("!")) {
      result = single_operand(opcode);
      result.negated = !result.negated;
    } else if (token.is("{") || token.is("(")) {
      result.kind = Operand::Kind::kVector;
      const char* end = token.is("{") ? "}" : ")";
      while (!lexer_.take_if(end)) {
        if (!lexer_.take_if(",")) result.parts.push_back(single_operand(opcode));
      }
    } else if (token.is("[")) {
      result.kind = Operand::Kind::kAddress;
      result.parts.push_back(single_operand(opcode));
      while (!lexer_.take_if("]")) {
        if (lexer_.take_if("+")) {
          result.immediate = to_number(lexer_.take().text, lexer_).bits;
        } else if (lexer_.peek().kind == Token::Kind::kNumber && lexer_.peek().text[0] == '-') {
          result.immediate = to_number(lexer_.take().text, lexer_).bits;
        } else {
          lexer_.expect(",");
          result.parts.push_back(single_operand(opcode));
        }
      }
    } else if (token.is("-")) {  // before a name such as WARP_SZ: not written by compilers
      lexer_.fail("'-' before what is not a number");
    } else if (token.kind == Token::Kind::kNumber) {
      const Number number = to_number(token.text, lexer_);
      result.kind = Operand::Kind::kImmediate;
      result.immediate = number.bits;
      result.literal = number.literal;
    } else if (token.kind == Token::Kind::kWord) {
      name(token.text, opcode, result);
    } else {
      lexer_.fail("'" + std::string(token.text) + "' is not an operand");
    }
    return result;
  }

  void name(std::string_view name, const std::string& opcode, Operand& result) {
    result.text = name;
    if (name == "_") {
      result.kind = Operand::Kind::kSink;
      return;
    }
    if (name == "WARP_SZ") {
      result.kind = Operand::Kind::kImmediate;
      result.immediate = kLanes;
      return;
    }
    const size_t digits = name.find_last_not_of("0123456789") + 1;
    const std::string stem(name.substr(0, digits));
    for (int s = scope_; s >= 0; s = scopes_[s].parent) {
      const Scope& scope = scopes_[s];
      int number = -1;
      if (const auto found = scope.registers.find(result.text); found != scope.registers.end()) {
        number = found->second;
      } else if (const auto range = scope.ranges.find(stem);
                 range != scope.ranges.end() && digits < name.size()) {
        const int place = std::stoi(result.text.substr(digits));
        if (place < range->second.second) number = range->second.first + place;
      }
      if (number >= 0) {
        result.number = number;
        result.bytes = function_->registers[number].bytes;
        result.kind = result.bytes ? Operand::Kind::kRegister : Operand::Kind::kPredicate;
        return;
      }
      if (const auto found = scope.variables.find(result.text); found != scope.variables.end()) {
        result.kind = Operand::Kind::kSymbol;
        result.number = found->second;
        return;
      }
    }
    if (name[0] == '%') {
      result.kind = Operand::Kind::kSpecial;
      result.bytes = 4;
    } else if (opcode == "bra" || opcode == "brx") {
      result.kind = Operand::Kind::kLabel;
    } else {
      result.kind = Operand::Kind::kSymbol;  // of the module
    }
  }

  // Labels may stand behind the branches to them, so that they are found when the function ends.
  void resolve_labels() {
    for (size_t i = 0; i < function_->statements.size(); ++i) {
      for (Operand& operand : function_->statements[i].operands) {
        if (operand.kind != Operand::Kind::kLabel) continue;
        for (int s = scope_of_statement_[i]; s >= 0 && operand.number < 0; s = scopes_[s].parent) {
          const auto found = scopes_[s].labels.find(operand.text);
          if (found != scopes_[s].labels.end()) operand.number = found->second;
        }
        if (operand.number < 0) {
          throw Failure("PTX line " + std::to_string(function_->statements[i].line) +
                        ": there is no label " + operand.text);
        }
      }
    }
  }

  Lexer lexer_;
  Text text_;
  bool extern_ = false;
  Function* function_ = nullptr;
  std::vector<Scope> scopes_;
  std::vector<int> scope_of_statement_;
  int scope_ = 0;
  const std::string* source_ = nullptr;
  int source_line_ = 0;
  uint64_t used_bytes_ = ~uint64_t{0};
};

}  // namespace

Text parse(std::string_view ptx) { return Parser(ptx).parse(); }

}  // namespace emulator
