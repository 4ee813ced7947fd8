// The Python module realhf.planning._search: the only file that knows of pybind11.
//
// A problem arrives as the tables of realhf/planning/problem/tables.py, calls and transfers as dictionaries.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "exact.h"
#include "osdp.h"
#include "problem.h"
#include "reallocation.h"
#include "search.h"
#include "simulator.h"
#include "solve.h"

namespace py = pybind11;
using namespace realhf::search;

namespace {

std::vector<Parent> parents_of(const py::dict& node) {
    std::vector<Parent> parents;
    for (const auto& [parent, back] : node["parents"].cast<std::vector<std::pair<int, int>>>()) {
        parents.push_back({parent, back});
    }
    return parents;
}

// Seconds of sources x targets as a sequence of Python, row-major, that a problem shares.
class Table {
public:
    explicit Table(PlacedTimes times) : times_(std::make_shared<PlacedTimes>(std::move(times))) {}

    const std::shared_ptr<PlacedTimes>& times() const { return times_; }
    std::size_t size() const { return times_->sources.size() * times_->targets.size(); }
    double& operator[](std::size_t place) const {
        if (place >= size()) throw py::index_error();
        const std::size_t width = times_->targets.size();
        return times_->numbers[times_->position(place / width, place % width)];
    }
    std::vector<double> part(const py::slice& slice) const {
        std::vector<double> result;
        std::size_t start, stop, step, length;
        if (!slice.compute(size(), &start, &stop, &step, &length)) throw py::error_already_set();
        for (std::size_t i = 0; i < length; ++i, start += step) result.push_back((*this)[start]);
        return result;
    }

private:
    std::shared_ptr<PlacedTimes> times_;
};

// A list of numbers, a contiguous buffer of doubles, or a Table, which is shared, not copied: whoever made it writes no
// more.
Times times_of(const py::handle& numbers, int num_columns) {
    if (py::isinstance<Table>(numbers)) return {numbers.cast<const Table&>().times(), num_columns};
    if (!PyObject_CheckBuffer(numbers.ptr())) return {numbers.cast<std::vector<double>>(), num_columns};
    const py::buffer_info info = py::reinterpret_borrow<py::buffer>(numbers).request();
    const bool is_flat = info.ndim == 1 && (info.size < 2 || info.strides[0] == sizeof(double));
    if (!is_flat || !info.item_type_is_equivalent_to<double>()) {
        throw std::invalid_argument("planning problem: times must be a list of numbers or a buffer of doubles");
    }
    const double* const begin = static_cast<const double*>(info.ptr);
    return {std::vector<double>(begin, begin + info.size), num_columns};
}

constexpr std::size_t kMaxStrategiesSpared = 4096;  // there is a number for every two

// Of a call: [(home's strategy, copy's strategy, bytes)].
Sparing sparing_of(const py::dict& node, const std::map<std::string, int>& strategies) {
    Sparing result;
    if (!node["in_place_bytes"].is_none()) result.in_place_bytes = node["in_place_bytes"].cast<double>();
    if (py::len(node["spared"]) == 0) return result;
    if (strategies.size() > kMaxStrategiesSpared) throw std::invalid_argument("planning problem: too many strategies");
    for (const auto& [home, copy, bytes] : node["spared"].cast<std::vector<std::tuple<std::string, std::string, double>>>()) {
        const auto row = strategies.find(home), column = strategies.find(copy);
        if (row == strategies.end() || column == strategies.end()) continue;
        result.num_strategies = static_cast<int>(strategies.size());
        result.bytes.resize(strategies.size() * strategies.size());
        result.bytes[row->second * strategies.size() + column->second] = bytes;
    }
    return result;
}

// All times have the problem's unit (`unit_us`).
Problem problem_of(const py::dict& tables) {
    Problem problem;
    problem.num_devices = tables["num_devices"].cast<int>();
    problem.device_memory_bytes = tables["device_memory_bytes"].cast<double>();
    problem.steps = tables["steps"].cast<int>();
    problem.max_steps_in_flight = tables["max_steps_in_flight"].cast<int>();
    std::map<std::string, int> strategies;
    std::map<std::vector<int>, int> communicators{{{}, 0}};
    for (const py::handle& item : tables["calls"]) {
        const py::dict node = py::reinterpret_borrow<py::dict>(item);
        Call call{node["home"].cast<int>(), parents_of(node), {}};
        for (const py::handle& row : node["options"]) {
            const auto [first, size] = row.attr("devices").cast<std::pair<int, int>>();
            const auto label = strategies.emplace(row.attr("strategy").cast<std::string>(), strategies.size()).first;
            const auto [set, is_new] =
                communicators.emplace(row.attr("communicators").cast<std::vector<int>>(), communicators.size());
            if (is_new) problem.communicators.push_back(set->first);
            call.options.push_back({first, size, label->second, row.attr("time_s").cast<double>(),
                                    row.attr("static_bytes").cast<double>(), row.attr("dynamic_bytes").cast<double>(),
                                    row.attr("copy_bytes").cast<double>(), set->second});
        }
        problem.calls.push_back(std::move(call));
    }
    problem.communicator_bytes = tables["communicator_bytes"].cast<double>();
    problem.sending_bytes = tables["sending_bytes"].cast<double>();
    for (const auto& [source, takers, beside, bytes] :
         tables["kept"].cast<std::vector<std::tuple<int, std::vector<int>, std::vector<int>, double>>>()) {
        problem.kept.push_back({source, takers, beside, bytes});
    }
    std::size_t number = 0;
    for (const py::handle& item : tables["calls"]) {
        problem.calls[number++].spared = sparing_of(py::reinterpret_borrow<py::dict>(item), strategies);
    }
    for (const py::handle& item : tables["transfers"]) {
        const py::dict node = py::reinterpret_borrow<py::dict>(item);
        const int source = node["source"].cast<int>(), target = node["target"].cast<int>();
        problem.transfers.push_back({source, target, node["on"].cast<std::vector<int>>(), parents_of(node),
                                     node["rows"].cast<std::vector<int>>(), node["columns"].cast<std::vector<int>>(),
                                     times_of(node["seconds"], node["num_columns"].cast<int>()),
                                     node["free_if_unmoved"].cast<bool>()});
    }
    problem.check();
    return problem;
}

// A problem, and the simulator that evaluates its plans one after the other: they often differ in one call alone.
struct Engine {
    explicit Engine(const py::dict& tables) : problem(problem_of(tables)), simulator(problem) {}

    const Problem problem;
    Simulator simulator;
};

void check_plan(const Problem& problem, const Plan& plan) {
    if (plan.size() != problem.calls.size()) throw std::invalid_argument("a plan names one option for every call");
    for (std::size_t i = 0; i < plan.size(); ++i) {
        if (plan[i] < 0 || plan[i] >= static_cast<int>(problem.calls[i].options.size())) {
            throw std::invalid_argument("call " + std::to_string(i) + " has no option " + std::to_string(plan[i]));
        }
    }
}

py::dict dict_of(const Evaluation& evaluation) {
    py::dict result;
    result["step_time"] = evaluation.step_time;
    result["peak_bytes"] = evaluation.peak_bytes;
    result["feasible"] = evaluation.feasible;
    result["cost"] = evaluation.cost;
    return result;
}

// The fields of realhf.planning.problem.native.Found, but the seconds that it took.
py::dict dict_of(const Solution& solution) {
    py::dict result;
    result["choice"] = solution.plan;
    result["step_s"] = solution.evaluation.step_time;
    result["peak_bytes"] = solution.evaluation.peak_bytes;
    result["feasible"] = solution.evaluation.feasible;
    result["cost"] = solution.evaluation.cost;
    result["lower_bound_s"] = solution.lower_bound;
    result["proven"] = solution.proven;
    result["all_evaluations"] = solution.counts.total();
    result["full_evaluations"] = solution.search_counts.full;
    result["early_rejections"] = solution.search_counts.rejected;
    result["trace"] = solution.trace;
    return result;
}

// (first device, size, dp, tp, pp, chunks, divided)
using LayoutRow = std::tuple<int, int, int, int, int, int, int>;

std::vector<ModelLayout> layouts_of(const std::vector<LayoutRow>& rows) {
    std::vector<ModelLayout> result;
    for (const auto& [first, size, dp, tp, pp, chunks, divided] : rows) {
        result.push_back({first, {size, dp, tp, pp, chunks, divided}});
    }
    return result;
}

ModelSizes sizes_of(const py::dict& sizes) {
    const auto size = [&](const char* name) { return sizes[name].cast<std::int64_t>(); };
    return {sizes["num_layers"].cast<int>(), size("layer_sharded"),   size("layer_replicated"),
            size("embedding_sharded"),       size("embedding_replicated"), size("head_sharded"),
            size("head_replicated"),         sizes["tied"].cast<bool>()};
}

using OsdpMode = std::tuple<double, std::int64_t, bool>;
using OsdpCut = std::tuple<int, std::int64_t, std::vector<OsdpMode>>;

py::dict solve_osdp(const std::vector<std::vector<OsdpCut>>& operators, std::int64_t memory_bytes,
                    std::int64_t bytes_per_sample, double seconds_per_sample, int min_batch, int max_batch,
                    double time_limit_s) {
    osdp::Problem problem{{}, memory_bytes, bytes_per_sample, seconds_per_sample};
    for (const auto& cuts : operators) {
        osdp::Operator op;
        for (const auto& [slices, gather_bytes, modes] : cuts) {
            op.cuts.push_back({slices, gather_bytes, {}});
            for (const auto& [seconds, bytes, gathers] : modes) {
                op.cuts.back().modes.push_back({seconds, bytes, gathers});
            }
        }
        problem.operators.push_back(std::move(op));
    }
    osdp::Solution solution;
    {
        py::gil_scoped_release release;
        solution = osdp::solve(problem, min_batch, max_batch, time_limit_s);
    }
    py::dict result;
    result["feasible"] = solution.feasible;
    result["batch"] = solution.batch;
    result["step_s"] = solution.step_s;
    result["lower_bound_s"] = solution.lower_bound_s;
    result["proven"] = solution.proven;
    result["cuts"] = solution.cuts;
    result["slices"] = solution.slices;
    result["smallest_fixed_bytes"] = solution.smallest_fixed_bytes;
    result["states"] = solution.states;
    return result;
}

}  // namespace

PYBIND11_MODULE(_search, module) {
    module.doc() = "Simulator and search over planning problems (csrc/search).";

    py::class_<Progress>(module, "Progress", "The plans that `solve` has found so far, for another thread")
        .def(py::init<>())
        .def_property_readonly("evaluations", [](const Progress& progress) { return progress.evaluations.load(); })
        .def_property_readonly("cost", [](const Progress& progress) { return progress.cost.load(); })
        .def("stop", [](Progress& progress) { progress.stop = true; });

    py::class_<Engine>(module, "Problem")
        .def(py::init<const py::dict&>(), py::arg("tables"))
        .def("evaluate",
             [](Engine& engine, const Plan& plan) {
                 check_plan(engine.problem, plan);
                 return dict_of(evaluate(engine.simulator, plan));
             })
        .def(
            "trace",
            [](const Engine& engine, const Plan& plan, int steps, const std::vector<std::pair<int, int>>& order) {
                check_plan(engine.problem, plan);
                std::vector<std::tuple<int, int, double, double, std::vector<int>>> events;
                for (Event& event : Simulator(engine.problem, steps).trace(plan, order)) {
                    events.emplace_back(event.node, event.step, event.start, event.end, std::move(event.waits));
                }
                return events;
            },
            "[(node, step, start_s, end_s, numbers of the events that it waits for)] in the order in which the nodes were "
            "taken; those of `order`, (node, step), run in that order where they share a device",
            py::arg("plan"), py::arg("steps"), py::arg("order"))
        .def(
            "device_needs",
            [](Engine& engine, const Plan& plan) {
                check_plan(engine.problem, plan);
                std::vector<std::tuple<double, double, double>> needs;
                for (int device = 0; device < engine.problem.num_devices; ++device) {
                    const DeviceNeed need = engine.simulator.need_at(plan, device);
                    needs.emplace_back(need.communicators, need.statics, need.peak);
                }
                return needs;
            },
            "[(bytes of communicators, with them what stays whatever runs, peak)] of each device")
        .def(
            "solve",
            [](const Engine& engine, std::uint64_t seed, std::int64_t evaluations, double seconds, int threads,
               bool single_moves, bool proves, const std::vector<Plan>& starts, Progress& progress) {
                for (const Plan& plan : starts) check_plan(engine.problem, plan);
                const SolveOptions options{seed, evaluations, seconds, threads, single_moves, proves, starts};
                Solution solution;
                {
                    py::gil_scoped_release release;
                    solution = solve(engine.problem, options, progress);
                }
                return dict_of(solution);
            },
            py::kw_only(), py::arg("seed"), py::arg("evaluations"), py::arg("seconds"), py::arg("threads"),
            py::arg("single_moves"), py::arg("proves"), py::arg("starts"), py::arg("progress"))
        .def(
            "lower_bound",
            [](const Engine& engine, const Plan& chosen, double limit) {
                Plan plan = chosen;
                for (int& option : plan) option = std::max(option, 0);
                check_plan(engine.problem, plan);
                return lower_bound(engine.problem, chosen, limit);
            },
            "on the step time of all plans with these options (-1: any); infinity if it is above the limit",
            py::arg("chosen"), py::arg("limit") = kInfinity)
        .def("smallest_plan", [](const Engine& engine, std::uint64_t seed) { return smallest_plan(engine.problem, seed); });

    py::class_<Table>(module, "Table",
                      "Seconds, row-major; what is written counts wherever the same strategies lie alike to one another")
        .def("__len__", &Table::size)
        .def("__getitem__", [](const Table& table, std::size_t place) { return table[place]; })
        .def("__getitem__", &Table::part)
        .def("__setitem__", [](const Table& table, std::size_t place, double number) { table[place] = number; })
        .def("divide", [](const Table& table, double by) {
            for (double& number : table.times()->numbers) number /= by;
        });

    module.def(
        "reallocation_table",
        [](const py::dict& sizes, const std::vector<LayoutRow>& sources, const std::vector<LayoutRow>& targets,
           std::pair<double, double> within_node, std::pair<double, double> across_nodes, int devices_per_node,
           std::int64_t most_sent, int threads) {
            const Links links{{within_node.first, within_node.second}, {across_nodes.first, across_nodes.second},
                              devices_per_node};
            const ModelSizes model = sizes_of(sizes);
            const auto from = layouts_of(sources), to = layouts_of(targets);
            const py::gil_scoped_release release;
            return Table(reallocation_times(model, from, to, links, most_sent, threads));
        },
        "Seconds of the reallocations of sources x targets, row-major, given (latency_s, s_per_element) of the links",
        py::arg("sizes"), py::arg("sources"), py::arg("targets"), py::kw_only(), py::arg("within_node"),
        py::arg("across_nodes"), py::arg("devices_per_node"), py::arg("most_sent"), py::arg("threads"));

    module.def("solve_osdp", &solve_osdp,
               "Operators are lists of (slices, gather_bytes, [(seconds, bytes, gathers)] of one slice), of which one is "
               "chosen; see csrc/search/osdp.h",
               py::arg("operators"), py::arg("memory_bytes"), py::arg("bytes_per_sample") = 0,
               py::arg("seconds_per_sample") = 0.0, py::arg("min_batch") = 1, py::arg("max_batch") = 1,
               py::arg("time_limit_s") = 1.0);
    module.attr("MOST_SLICES") = osdp::most_slices;
}
