#include "exchange.h"

#include <algorithm>
#include <stdexcept>

namespace {

using Clock = FlagBoard::Clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

Exchange::Exchange(FlagBoard& board, std::vector<size_t> lanes, std::vector<const Routes*> routes, uint32_t epoch,
                   Dtype sums, double patience)
    : board_(board), lanes_(std::move(lanes)), routes_(std::move(routes)), epoch_(epoch), sums_(sums), patience_(patience) {
  if (sums != Dtype::f32 && sums != Dtype::bf16)
    throw std::invalid_argument("sums of dtype code " + std::to_string(int(sums)));
  for (const Routes* layer : routes_)
    if (layer->nodes != int64_t(lanes_.size()))
      throw std::invalid_argument(std::to_string(lanes_.size()) + " lanes to " + std::to_string(layer->nodes) + " nodes");
}

void Exchange::send(size_t layer, const void* x, int64_t row_bytes, const int32_t* expert, const float* weight,
                    int64_t rows, int64_t choices) {
  sent_ = Clock::now();
  layer_ = uint32_t(layer);
  rows_ = rows;
  parts_.clear();
  split_.emplace(*routes_.at(layer), uintptr_t(x), row_bytes, row_bytes, uintptr_t(expert), false, rows, choices);
  for (auto [node, count] : split_->parts()) {
    size_t lane = lanes_[node];
    const Terms& terms = board_.out(lane).terms();
    if (terms.row_bytes != row_bytes || terms.choices != choices || terms.scale_bytes)
      throw std::invalid_argument("rows unlike those of the mailbox");
    uint32_t number = board_.sent(lane) + 1;
    board_.send(lane, split_->load(size_t(node), uintptr_t(weight)), number, epoch_, layer_);
    parts_.push_back({size_t(node), number, count});
  }
}

bool Exchange::came(const Part& part) const {
  Taken found = board_.look(lanes_[part.node]);
  const Header& header = found.header;
  return found.good && found.number == part.number && header.epoch == epoch_ && header.layer == layer_ &&
         header.rows == part.rows;
}

bool Exchange::all_came() {
  std::vector<size_t> left;
  for (const Part& part : parts_) left.push_back(lanes_[part.node]);
  auto start = Clock::now();
  while (!left.empty()) {
    double wait = patience_ - seconds_since(start);
    std::vector<size_t> found = wait > 0 ? board_.wait(left, wait) : std::vector<size_t>();
    if (found.empty()) return false;
    left.erase(std::remove_if(left.begin(), left.end(),
                              [&](size_t lane) { return std::find(found.begin(), found.end(), lane) != found.end(); }),
               left.end());
  }
  return std::all_of(parts_.begin(), parts_.end(), [this](const Part& part) { return came(part); });
}

const float* Exchange::sums(float* own, int64_t hidden) {
  auto start = Clock::now();
  bool whole = all_came();
  spans_.waited += seconds_since(start);
  if (!whole) return nullptr;
  spans_.under_way += seconds_since(sent_);
  for (const Part& part : parts_) board_.settle(lanes_[part.node], part.number);
  auto rows_of = [this](const Part& part) { return board_.in(lanes_[part.node]).rows(part.rows); };
  if (parts_.size() == 1 && parts_[0].rows == rows_ && sums_ == Dtype::f32)
    return reinterpret_cast<const float*>(rows_of(parts_[0]));
  std::fill(own, own + rows_ * hidden, 0.0f);
  for (const Part& part : parts_)
    split_->add(part.node, uintptr_t(rows_of(part)), int(sums_), uintptr_t(own), hidden);
  return own;
}

Exchange::Spans Exchange::take_spans() {
  Spans taken = spans_;
  spans_ = {};
  return taken;
}
