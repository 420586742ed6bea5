// Operators with a CUDA kernel but no CPU kernel, written with operators that have a CPU kernel.
#include <ATen/ATen.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include "call.h"

namespace simulation {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Dropout with the generator of the device. The CPU kernel uses the generator of the CPU.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0 || (train.has_value() && !*train) || p == 0)
    return {input.clone(), at::empty_like(input, input.options().dtype(at::kBool)).fill_(true)};
  const double kept = 1 - p;
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(kept);
  return {input.mul(mask).mul_(kept == 0 ? 0.0 : 1 / kept), mask};
}

// Counts of integers, which the kernel of the CPU does not take. Experts of transformers count their tokens.
Tensor histc(const Tensor& input, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  Call call;
  call.look(input);
  const auto host = call.to_host(input);
  BelowEverything guard;
  const auto values = c10::isIntegralType(host.scalar_type(), false) ? host.to(at::kDouble) : host;
  return call.from_host(at::histc(values, bins, min, max).to(host.scalar_type()));
}

Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) { return bias && bias->defined() ? gates + *bias : gates; }

// Cells of nn.LSTM and nn.GRU (aten/src/ATen/native/RNN.cpp). Autograd records their operators, so the workspace is empty.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto cy = gates[1].sigmoid() * cx + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * cy.tanh(), cy, at::empty({0}, cx.options())};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto fresh = (input[2] + (input[0] + hidden[0]).sigmoid() * hidden[2]).tanh();
  return {fresh + (input[1] + hidden[1]).sigmoid() * (hx - fresh), at::empty({0}, hx.options())};
}

// Attention without the matrix of probabilities. The CPU has no such kernel with dropout.
int64_t attention_kind(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask, double dropout, bool causal,
    std::optional<double> scale, bool grouped) {
  if (mask && mask->requires_grad()) return 0;  // the kernel of the CPU has no gradient for the mask
  Call call;
  OptionalTensor host_mask;
  if (mask) host_mask = call.to_host(*mask);
  const auto kind = at::_fused_sdp_choice(
      call.to_host(query), call.to_host(key), call.to_host(value), host_mask, dropout, causal, scale, grouped);
  constexpr int64_t kFlash = 1, kOverrideable = 4;  // at::SDPBackend
  return kind == kFlash ? kOverrideable : 0;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask, double dropout, bool causal, bool,
    std::optional<double> scale) {
  auto [output, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, mask, scale);
  const auto none = at::empty({0}, query.options());
  return {output, logsumexp, none, none, query.sym_size(2), key.sym_size(2), none, none, none};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask, std::array<bool, 4>,
    const Tensor& output, const Tensor& logsumexp, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout,
    bool causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  const auto given = mask.defined() ? OptionalTensor(mask) : std::nullopt;
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, query, key, value, output, logsumexp, dropout, causal, given, scale);
  return {of_query, of_key, of_value, Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_dropout", &native_dropout);
  m.impl("histc", &histc);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
}

// torch does not dispatch to the operator _fused_sdp_choice, but uses the table behind it.
const bool chooses_attention = [] {
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&attention_kind);
  return true;
}();

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
}

}  // namespace
}  // namespace simulation
