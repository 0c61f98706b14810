// Calls of device functions: the body of the function takes the call's place, with registers and
// variables of its own. So lanes diverge and come together within it as they do everywhere.
#include "text.h"

namespace emulator {
namespace {

constexpr int kMaxDepth = 16;

// How a callee's numbers become the caller's.
struct Renumbering {
  int registers, labels;
  std::vector<int> variables;
};

void renumber(Operand& operand, const Renumbering& by) {
  using Kind = Operand::Kind;
  if (operand.kind == Kind::kRegister || operand.kind == Kind::kPredicate) {
    operand.number += by.registers;
  } else if (operand.kind == Kind::kLabel) {
    operand.number += by.labels;
  } else if (operand.kind == Kind::kSymbol && operand.number >= 0) {
    operand.number = by.variables[operand.number];
  }
  for (Operand& part : operand.parts) renumber(part, by);
}

struct Call {
  std::string callee;
  std::vector<int> arguments;  // the caller's variables, results first
};

Call read_call(const Statement& statement) {
  Call call;
  for (const Operand& operand : statement.operands) {
    if (operand.kind == Operand::Kind::kSymbol && operand.number < 0) {
      call.callee = operand.text;
    } else if (operand.kind == Operand::Kind::kVector) {
      for (const Operand& part : operand.parts) call.arguments.push_back(part.number);
    }
  }
  return call;
}

void expand(const Text& text, Function& function, int depth);

// Appends a copy of the callee's body to `body`.
void append(const Text& text, const Statement& statement, Function& caller,
            std::vector<Statement>& body, int depth) {
  const std::string where = "PTX line " + std::to_string(statement.line) + ": ";
  const Call call = read_call(statement);
  const auto found = text.functions.find(call.callee);
  if (found == text.functions.end() || !found->second.defined) {
    throw Failure(where + "the function '" + call.callee + "' is not defined");
  }
  if (depth > kMaxDepth) throw Failure(where + "calls are nested too deeply");
  if (statement.guard.kind != Operand::Kind::kSink) throw Failure(where + "a call with a guard");
  Function callee = found->second;
  expand(text, callee, depth + 1);
  if (callee.parameters.size() != call.arguments.size()) {
    throw Failure(where + "the number of arguments is not the function's");
  }

  Renumbering by{static_cast<int>(caller.registers.size()), static_cast<int>(caller.labels.size()),
                 std::vector<int>(callee.variables.size(), -1)};
  for (size_t i = 0; i < call.arguments.size(); ++i)
    by.variables[callee.parameters[i]] = call.arguments[i];
  for (size_t i = 0; i < callee.variables.size(); ++i) {
    if (by.variables[i] >= 0) continue;
    by.variables[i] = static_cast<int>(caller.variables.size());
    caller.variables.push_back(callee.variables[i]);
  }
  caller.registers.insert(caller.registers.end(), callee.registers.begin(), callee.registers.end());
  for (size_t label : callee.labels) caller.labels.push_back(body.size() + label);
  const int end = static_cast<int>(caller.labels.size());
  caller.labels.push_back(body.size() + callee.statements.size());
  for (Statement& inner : callee.statements) {
    renumber(inner.guard, by);
    for (Operand& operand : inner.operands) renumber(operand, by);
    if (inner.parts[0] == "ret") {
      Operand target;
      target.kind = Operand::Kind::kLabel;
      target.number = end;
      inner.opcode = "bra";
      inner.parts = {"bra"};
      inner.operands = {target};
    }
    body.push_back(std::move(inner));
  }
}

void expand(const Text& text, Function& function, int depth) {
  std::vector<Statement> body;
  std::vector<size_t> moved(function.statements.size() + 1);  // where each statement is afterwards
  const size_t own_labels = function.labels.size();
  for (size_t i = 0; i < function.statements.size(); ++i) {
    moved[i] = body.size();
    Statement& statement = function.statements[i];
    if (statement.parts[0] == "call") {
      append(text, statement, function, body, depth);
    } else {
      body.push_back(std::move(statement));
    }
  }
  moved.back() = body.size();
  for (size_t i = 0; i < own_labels; ++i) function.labels[i] = moved[function.labels[i]];
  function.statements = std::move(body);
}

}  // namespace

void inline_calls(const Text& text, Function& function) { expand(text, function, 0); }

}  // namespace emulator
