// The data plane's Python names: routes, splits, mailboxes and flag boards. Addresses were checked by comm/*.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <string>

#include "answer.h"
#include "bind.h"
#include "exchange.h"
#include "flags.h"
#include "mailbox.h"
#include "split.h"

namespace {

constexpr int64_t kLong = 32768;  // bytes; moving more than that is worth letting another thread have the interpreter

uint64_t eight_bytes(const py::bytes& bytes) {
    std::string text = bytes;
    uint64_t word;
    if (text.size() != sizeof word) throw std::invalid_argument("a part of a header has 8 bytes");
    std::memcpy(&word, text.data(), sizeof word);
    return word;
}

Mailbox make_mailbox(Address address, int64_t capacity, Address progress, const py::bytes& first, const py::bytes& where,
                     int64_t row_bytes, int64_t choices, int64_t scale_bytes, int64_t max_rows, int64_t layers,
                     int64_t slots) {
    Terms terms{eight_bytes(first), eight_bytes(where), row_bytes, choices, scale_bytes, max_rows, layers, slots};
    return {address, capacity, progress, terms};
}

uint32_t send(FlagBoard& board, size_t lane, const Load& load, uint32_t number, uint32_t epoch, uint32_t layer) {
    if (load.rows * board.out(lane).terms().row_bytes < kLong) return board.send(lane, load, number, epoch, layer);
    py::gil_scoped_release release;
    return board.send(lane, load, number, epoch, layer);
}

// All rows as they lie. In a combine `slot` and `weight` are 0.
uint32_t send_rows(FlagBoard& board, size_t lane, uint32_t number, uint32_t epoch, uint32_t layer, int64_t rows, Address x,
                   int64_t stride, Address slot, Address weight) {
    if (board.out(lane).terms().choices && rows && (slot == 0 || weight == 0))
        throw std::invalid_argument("a dispatch needs slots and weights");
    return send(board, lane, {at<char>(x), stride, at<int32_t>(slot), at<float>(weight), nullptr, rows, 0}, number, epoch,
                layer);
}

uint32_t send_split(FlagBoard& board, size_t lane, uint32_t number, uint32_t epoch, uint32_t layer, const RowSplit& split,
                    Address weight, size_t node) {
    const Terms& terms = board.out(lane).terms();
    if (terms.row_bytes != split.row_bytes() || terms.choices != split.choices() || terms.scale_bytes)
        throw std::invalid_argument("rows unlike those of the mailbox");
    return send(board, lane, split.load(node, weight), number, epoch, layer);
}

// (good, sequence number, epoch, layer, rows)
py::tuple take(FlagBoard& board, size_t lane) {
    Taken taken = board.take(lane);
    return py::make_tuple(taken.good, taken.number, taken.header.epoch, taken.header.layer, taken.header.rows);
}

std::vector<size_t> wait(FlagBoard& board, const std::vector<size_t>& which, double timeout) {
    std::vector<size_t> found = board.changed(which);
    if (!found.empty() || timeout <= 0) return found;
    py::gil_scoped_release release;
    return board.wait(which, timeout);
}

// None, or (lane, messages, rows, seconds) and of the last one (number, epoch, layer, rows, seconds).
py::object answer_some(FlagBoard& board, const ExpertLayers& experts, const std::vector<uint32_t>& epochs,
                       const std::vector<int64_t>& most_rows, double wait, double serve) {
    Answered done;
    {
        py::gil_scoped_release release;
        done = answer(board, experts, {epochs, most_rows}, wait, serve);
    }
    if (!done.messages) return py::none();
    return py::make_tuple(done.lane, done.messages, done.rows, done.seconds, done.last.sequence, done.last.epoch,
                          done.last.layer, done.last.rows, done.last_seconds);
}

}  // namespace

void bind_m2n(py::module_& module) {
    module.attr("data_plane") = 6;  // what comm/native.py expects; raise both when a signature changes
    py::class_<Routes>(module, "Routes", "One layer of a placement; see comm/m2n/routes.py.")
        .def(py::init<Address, Address, int64_t, int64_t, int64_t, int64_t>());
    py::class_<RowSplit>(module, "RowSplit", "The rows of one dispatch by expert node; see comm/m2n/rows.py.")
        .def(py::init<const Routes&, Address, int64_t, int64_t, Address, bool, int64_t, int64_t>())
        .def("parts", &RowSplit::parts)
        .def("rows", &RowSplit::rows)
        .def("fill", &RowSplit::fill)
        .def("add", &RowSplit::add);
    module.def("copy_choices", &copy_choices);
    py::class_<Mailbox>(module, "Mailbox", "One direction of one box; see comm/mailbox/mailbox.py.").def(py::init(&make_mailbox));
    py::class_<ExpertLayers>(module, "ExpertLayers", "The experts that `FlagBoard.answer` asks; see kernels/native_products.py.")
        .def(py::init([](Engine& engine, std::vector<std::shared_ptr<Experts>> layers, int rows, int sums) {
                 return ExpertLayers(engine, std::move(layers), dtype_of(rows), dtype_of(sums));
             }),
             py::keep_alive<1, 2>());
    py::class_<FlagBoard>(module, "FlagBoard", "Flag words of all lanes of one end; see comm/mailbox/flags.py.")
        .def(py::init<const std::vector<FlagBoard::Addresses>&, const std::vector<uintptr_t>&, bool>(), py::arg("lanes"),
             py::arg("bells"), py::arg("spins") = true)
        .def("value", &FlagBoard::value)
        .def("settle", &FlagBoard::settle)
        .def("post", &FlagBoard::post)
        .def("changed", &FlagBoard::changed)
        .def("wait", &wait)
        .def("lend", &FlagBoard::lend)
        .def("watch", &FlagBoard::watch)
        .def("carry", &FlagBoard::carry, py::keep_alive<1, 3>(), py::keep_alive<1, 4>())
        .def("send_rows", &send_rows)
        .def("send_split", &send_split)
        .def("take", &take)
        .def("answer", &answer_some)
        .def("sent", &FlagBoard::sent)
        .def("taken", &FlagBoard::taken)
        .def_property_readonly("spin_budget", &FlagBoard::spin_budget);
    py::class_<Exchange>(module, "Exchange", "Dispatches of one micro-batch for `Stack.run`; see comm/transport.py.")
        .def(py::init([](FlagBoard& board, std::vector<size_t> lanes, std::vector<const Routes*> routes, uint32_t epoch,
                         int sums, double patience) {
                 return Exchange(board, std::move(lanes), std::move(routes), epoch, dtype_of(sums), patience);
             }),
             py::keep_alive<1, 2>());
}
