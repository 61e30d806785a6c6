#include "program.h"

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <map>
#include <stdexcept>
#include <thread>
#include <utility>

#include "fold.h"
#include "packing.h"
#include "patterns.h"
#include "steps.h"
#include "weight_store.h"

namespace specexport {
namespace {

bool is_weight_node(const Node& node) {
  return node.type == "DequantizeLinear" || node.type == "Cast" || node.type == "Transpose";
}

// A graph in which what `constants` nodes make counts as constant.
Graph with_constants(Graph graph, const std::vector<bool>& constants) {
  for (size_t n = 0; n < graph.nodes.size(); n++)
    if (constants[n]) graph.values[size_t(graph.nodes[n].outputs[0])].constant = true;
  return graph;
}

// The nodes that are folded into their readers; `banned` ones are not. `constants` are constant_nodes().
std::vector<bool> folded_nodes(const Graph& graph, const Uses& uses, const std::vector<bool>& banned,
                               const std::vector<bool>& constants) {
  const size_t count = graph.nodes.size();
  std::vector<bool> folded(count, false);
  for (size_t n = count; n-- > 0;) {
    const Node& node = graph.nodes[n];
    if ((!is_weight_node(node) && !constants[n]) || banned[n]) continue;
    const int value = node.outputs[0];
    if (uses.is_output[size_t(value)] || uses.readers[size_t(value)].empty()) continue;
    bool all = true;
    for (int index : uses.readers[size_t(value)]) {
      const Node& reader = graph.nodes[size_t(index)];
      const bool gathers = wide_gather_table(graph, uses, reader) >= 0 && reader.inputs[0] == value;
      const bool multiplies = reader.inputs.size() == 2 && reader.inputs[1] == value && reader.inputs[0] != value &&
                              product_source(graph, uses, reader).matrix.weights;
      all = all && (gathers || multiplies || folded[size_t(index)]);
    }
    // And it must come from a constant itself.
    int transpose = -1;
    const bool integers = integers_of(graph, uses, value, &transpose) >= 0 && size_t(transpose) == n;
    folded[n] = all && (constants[n] || integers || source_of(graph, uses, value).matrix.weights);
  }
  return folded;
}

// What rounds, or goes over numbers of the model in an order: left elsewhere, rows could differ.
bool rounds(const Node& node) {
  static const char* const kTypes[] = {
      "Attention", "Cos", "CumSum", "Erf", "Exp", "Gelu", "LayerNormalization", "Log", "MatMul", "Pow", "Reciprocal",
      "ReduceSum", "RMSNormalization", "RotaryEmbedding", "Sigmoid", "Sin", "Softmax", "Softplus", "Sqrt", "Tanh"};
  return std::any_of(std::begin(kTypes), std::end(kTypes), [&](const char* type) { return node.type == type; });
}

}  // namespace

std::vector<std::vector<size_t>> claim(const Graph& plain) {
  const Uses uses(plain);
  const size_t count = plain.nodes.size();
  std::vector<bool> banned(count, false);
  for (;;) {
    const std::vector<bool> constants = constant_nodes(plain, banned);
    const Graph graph = with_constants(plain, constants);
    const std::vector<bool> folded = folded_nodes(graph, uses, banned, constants);
    bool left = false;  // a constant that something else reads too
    for (size_t n = 0; n < count; n++)
      if (constants[n] && !folded[n]) left = banned[n] = true;
    if (left) continue;
    std::vector<bool> supported(count, false);
    for (size_t n = 0; n < count; n++) {
      const Node& node = graph.nodes[n];
      const Source source = product_source(graph, uses, node);
      const bool through = std::all_of(source.through.begin(), source.through.end(), [&](size_t i) { return folded[i]; });
      if (source.matrix.weights && through) supported[n] = true;
      // A matrix that is not folded is undone by ONNX Runtime, which fuses that into a product of its own.
      else if (source.matrix.weights && source.matrix.scales) supported[n] = false;
      else if (wide_gather_table(graph, uses, node) >= 0) supported[n] = folded[size_t(uses.producer[size_t(node.inputs[0])])];
      else if (node.type == "DequantizeLinear") supported[n] = folded[n];
      else supported[n] = folded[n] || has_step(graph, node);
    }
    // A node's level is how many times a path to it leaves what is supported; those of a level make a group.
    std::vector<int> level(count, 0);
    int levels = 0;
    for (size_t n = 0; n < count; n++) {
      for (int value : graph.nodes[n].inputs) {
        const int from = value >= 0 ? uses.producer[size_t(value)] : -1;
        if (from < 0) continue;
        level[n] = std::max(level[n], level[size_t(from)] + (supported[n] && !supported[size_t(from)] ? 1 : 0));
      }
      levels = std::max(levels, level[n] + 1);
    }
    // As late as readers allow: what is read late need not cross from an early group to a late one.
    for (size_t n = count; n-- > 0;) {
      if (!supported[n]) continue;
      int latest = -1;
      for (int value : graph.nodes[n].outputs)
        if (value >= 0)
          for (int reader : uses.readers[size_t(value)])
            latest = latest < 0 ? level[size_t(reader)] : std::min(latest, level[size_t(reader)]);
      if (latest >= 0) level[n] = latest;
    }
    // What is folded must be where all its readers are.
    bool apart = false;
    for (size_t n = 0; n < count; n++) {
      if (!folded[n]) continue;
      for (int reader : uses.readers[size_t(graph.nodes[n].outputs[0])])
        if (level[size_t(reader)] != level[n]) apart = banned[n] = true;
    }
    if (apart) continue;
    std::vector<std::vector<size_t>> groups;
    groups.resize(size_t(levels));
    std::vector<bool> worth(size_t(levels), false);
    for (size_t n = 0; n < count; n++) {
      if (!supported[n]) continue;
      groups[size_t(level[n])].push_back(n);
      if (rounds(graph.nodes[n])) worth[size_t(level[n])] = true;
    }
    std::vector<std::vector<size_t>> chosen;
    for (size_t i = 0; i < groups.size(); i++)
      if (worth[i]) chosen.push_back(std::move(groups[i]));
    return chosen;
  }
}

namespace {

class Compiled : public Program {
 public:
  Compiled(Graph graph, const Store& store)
      : none_(graph.nodes.size(), false),
        computed_(constant_nodes(graph, none_)),
        graph_(with_constants(std::move(graph), computed_)),
        weights_(store, matrices(graph_)) {
    const Uses uses(graph_);
    std::vector<bool> done = folded_nodes(graph_, uses, none_, computed_);
    offsets_ = find_offsets(graph_, uses, done);
    attention_ = find_attention(graph_, uses, done);
    for (size_t n = 0; n < graph_.nodes.size(); n++)
      if (!done[n]) add(uses, int(n), done);
    plan();
    numbers_.clear();  // packed by now
  }

  void run(Run& run) override {
    Team team(run.threads);
    Frame frame = {kernels(), team, arena_, run, views_, buffers_, output_index_};
    for (size_t i = 0; i < graph_.inputs.size(); i++) {
      View& view = views_[size_t(graph_.inputs[i])];
      view.type = run.inputs[i].type;
      view.set(run.inputs[i].dims);
      view.data = static_cast<char*>(run.inputs[i].data);
    }
    struct Work {
      Team& team;
      Frame& frame;
      const Compiled& program;
    } work = {team, frame, *this};
    auto walk = [](void* context, size_t) {
      Work& work = *static_cast<Work*>(context);
      work.team.enter([&] { work.program.walk(work.frame); });
    };
    if (run.threads > 1) run.parallel(walk, &work, size_t(run.threads));
    else walk(&work, 0);
    frame.free_scratch();
    for (char*& buffer : buffers_)
      if (buffer) arena_.give(std::exchange(buffer, nullptr));
    team.require_success();
  }

 private:
  void walk(Frame& frame) const {
    for (const std::unique_ptr<Step>& step : steps_) {
      frame.team.announce(step->ahead);
      try {
        step->run(frame);
      } catch (const std::exception& error) {
        throw std::runtime_error(step->name + ": " + error.what());
      }
      frame.free_scratch();
      for (int value : step->last_uses)
        if (char*& buffer = frame.buffers[size_t(value)]) frame.arena.give(std::exchange(buffer, nullptr));
    }
  }

  void add(const Uses& uses, int n, std::vector<bool>& done) {
    const Node& node = graph_.nodes[size_t(n)];
    if (const auto taken = attention_.find(n); taken != attention_.end()) {
      steps_.push_back(make_attention(taken->second.scale, taken->second.softcap, taken->second.inputs, node.outputs[0]));
      return;
    }
    if (const int table = wide_gather_table(graph_, uses, node); table >= 0) {
      steps_.push_back(make_gather(table, node.inputs[1], node.outputs[0]));
      return;
    }
    if (product_source(graph_, uses, node).matrix.weights) {
      const PackedWeights* offsets = nullptr;
      int y = node.outputs[0], addend = -1, reader = uses.only_reader(node);
      if (const auto taken = offsets_.find(n); taken != offsets_.end()) {
        offsets = &weights_[places_[size_t(taken->second)]];
        y = graph_.nodes[size_t(reader)].outputs[0];
        reader = uses.only_reader(graph_.nodes[size_t(reader)]);
      }
      // The sum with a residual, or a bias, is taken as the product is written.
      if (reader >= 0 && graph_.nodes[size_t(reader)].type == "Add" && !done[size_t(reader)]) {
        const Node& sum = graph_.nodes[size_t(reader)];
        const int other = sum.inputs[sum.inputs[0] == y ? 1 : 0];
        if (other != y && fits(other, y) && ready(uses, other, n)) {
          addend = other;
          y = sum.outputs[0];
          done[size_t(reader)] = true;
        }
      }
      std::unique_ptr<Step> step = make_product(weights_[places_[size_t(n)]], offsets, node.inputs[0], y, addend);
      step->name = node.name;
      steps_.push_back(std::move(step));
      return;
    }
    if (node.type == "Sigmoid") {  // x * sigmoid(x), and that times another
      const int reader = uses.only_reader(node);
      const Node* product = reader >= 0 ? &graph_.nodes[size_t(reader)] : nullptr;
      if (product && product->type == "Mul" && !done[size_t(reader)] &&
          (product->inputs[0] == node.inputs[0] || product->inputs[1] == node.inputs[0]) &&
          product->inputs[0] != product->inputs[1]) {
        done[size_t(reader)] = true;
        if (!gate(uses, *product, Unary::kSilu, node.inputs[0], reader, done))
          steps_.push_back(make_unary(Unary::kSilu, node.inputs[0], product->outputs[0]));
        return;
      }
    }
    if (node.type == "Gelu") {
      auto it = node.attributes.find("approximate");
      const bool tanh = it != node.attributes.end() && it->second.text == "tanh";
      if (gate(uses, node, tanh ? Unary::kGeluTanh : Unary::kGelu, node.inputs[0], n, done)) return;
    }
    steps_.push_back(make_step(graph_, node));
  }

  // function(x) * other, where the only reader of what `node` makes is such a product of equal shapes.
  bool gate(const Uses& uses, const Node& node, Unary function, int x, int index, std::vector<bool>& done) {
    const int reader = uses.only_reader(node);
    if (reader < 0 || done[size_t(reader)] || graph_.nodes[size_t(reader)].type != "Mul") return false;
    const Node& product = graph_.nodes[size_t(reader)];
    const int other = product.inputs[product.inputs[0] == node.outputs[0] ? 1 : 0];
    if (other == node.outputs[0] || !same_shape(other, x) || !ready(uses, other, index)) return false;
    done[size_t(reader)] = true;
    steps_.push_back(make_gate(function, x, other, product.outputs[0]));
    return true;
  }

  // Whether a value is there before a node runs.
  bool ready(const Uses& uses, int value, int node) const { return uses.producer[size_t(value)] < node; }

  bool same_shape(int a, int b) const {
    const Value &u = graph_.values[size_t(a)], &v = graph_.values[size_t(b)];
    if (!u.ranked || !v.ranked || u.dims.size() != v.dims.size() || u.dims.empty()) return false;
    // Free dimensions of one graph's activations are batch and tokens; what broadcasts has ones.
    for (size_t i = 0; i < u.dims.size(); i++)
      if (u.dims[i] != v.dims[i]) return false;
    return true;
  }
  bool fits(int addend, int product) const {
    const Value& value = graph_.values[size_t(addend)];
    if (value.type != Type::kFloat || !value.ranked || value.dims.empty()) return false;
    const Value& y = graph_.values[size_t(product)];
    const bool bias = value.dims.size() == 1 && y.ranked && !y.dims.empty() && value.dims[0] == y.dims.back() && value.dims[0] > 0;
    return bias || same_shape(addend, product);
  }

  // Finds when each value is used last, and which weights each step or the next one reads. Values that may look at
  // another's memory share its life.
  void plan() {
    const size_t count = graph_.values.size();
    views_.resize(count);
    buffers_.resize(count, nullptr);
    for (size_t i = 0; i < count; i++) {
      const Value& value = graph_.values[i];
      if (!value.data) continue;
      views_[i].type = value.type;
      views_[i].set(value.dims);
      views_[i].data = const_cast<char*>(static_cast<const char*>(value.data));
    }
    output_index_.assign(count, -1);
    for (size_t i = 0; i < graph_.outputs.size(); i++) output_index_[size_t(graph_.outputs[i])] = int(i);
    std::vector<int> root(count), last(count, -1);
    for (size_t i = 0; i < count; i++) root[i] = int(i);
    for (const std::unique_ptr<Step>& step : steps_)
      for (int value : step->outputs)
        if (value >= 0 && !step->inputs.empty() && step->inputs[0] >= 0) root[size_t(value)] = step->looks ? root[size_t(step->inputs[0])] : value;
    for (size_t s = 0; s < steps_.size(); s++) {
      for (int value : steps_[s]->inputs)
        if (value >= 0) last[size_t(root[size_t(value)])] = int(s);
      for (int value : steps_[s]->outputs)
        if (value >= 0) last[size_t(root[size_t(value)])] = std::max(last[size_t(root[size_t(value)])], int(s));
    }
    Ahead ahead;
    for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
      if (const PackedWeights* weights = (*step)->weights()) ahead = {weights->data, weights->bytes()};
      (*step)->ahead = ahead;
    }
    for (size_t i = 0; i < count; i++)
      if (last[size_t(root[i])] >= 0) steps_[size_t(last[size_t(root[i])])]->last_uses.push_back(int(i));
  }

  // Those of all products, in the order of the nodes.
  std::vector<Matrix> matrices(Graph& graph) {
    const Uses uses(graph);
    std::vector<Matrix> list;
    std::vector<int> computed;
    for (const Node& node : graph.nodes) {
      const Matrix matrix = product_source(graph, uses, node).matrix;
      places_.push_back(list.size());
      if (!matrix.weights) continue;
      list.push_back(matrix);
      for (const Value* value : {matrix.weights, matrix.scales})
        if (value && !value->data) computed.push_back(int(value - graph.values.data()));
    }
    evaluate(graph, computed, numbers_);
    return list;
  }

  const std::vector<bool> none_, computed_;     // nodes
  std::deque<std::vector<float>> numbers_;      // of scales that the graph computes from constants
  Graph graph_;
  std::vector<size_t> places_;  // of each node's matrix among the weights
  const WeightStore weights_;
  std::map<int, int> offsets_;  // of products, the one whose result is added to theirs
  std::map<int, AttentionInParts> attention_;  // by the node of the total
  std::vector<std::unique_ptr<Step>> steps_;
  std::vector<View> views_;      // of constants; of other values while it runs
  std::vector<char*> buffers_;   // none while it does not run
  std::vector<int> output_index_;
  Arena arena_;
};

}  // namespace

std::unique_ptr<Program> compile(Graph graph, const Store& store) {
  return std::make_unique<Compiled>(std::move(graph), store);
}

const char* instruction_set() { return kernels().name; }

}  // namespace specexport
