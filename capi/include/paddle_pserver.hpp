/**
 * @file paddle_pserver.hpp
 * @brief The client library of the parameter server for C++17 and later: the calls of paddle_pserver.h, edition 3,
 * with owners that release what they hold, views of memory that know their length and type, and exceptions.
 *
 * The functions have the names of C without paddle_, and their promises: paddle_pserver.h describes them. A call that
 * fails throws pserver::error, whose text is that of paddle_last_error.
 *
 * A pserver::client is made first and destroyed last: programs, views, buffers and started calls of a client must not
 * outlive it. Objects that own something can be moved and not copied.
 */
#ifndef PADDLE_PSERVER_HPP
#define PADDLE_PSERVER_HPP

#include <paddle_pserver.h>

#if PADDLE_PSERVER_EDITION != 3
#error "paddle_pserver.hpp is for edition 3 of paddle_pserver.h"
#endif

#include <climits>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace pserver {

/** @brief A call that failed: the argument, the value found, the value expected. */
class error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  /** @brief The error of this thread's last failing call. */
  static error last() {
    error made(paddle_last_error());
    made.code_ = paddle_last_error_code();
    return made;
  }
  /** @brief Why the call failed: one of PADDLE_ERROR_... */
  int code() const noexcept { return code_; }

 private:
  int code_ = PADDLE_ERROR_REFUSED;
};

namespace detail {

/** @brief The status of a call, unless it is that of a failure. */
inline int checked(int status) {
  if (status < 0) throw error::last();
  return status;
}

/** @brief What a call made, unless it made nothing. */
template <class T>
T *checked(T *made) {
  if (made == nullptr) throw error::last();
  return made;
}

/** @brief A number for the C interface, which has int. */
inline int narrowed(std::size_t number, const char *what) {
  if (number > static_cast<std::size_t>(INT_MAX)) {
    throw error(std::string(what) + ": found " + std::to_string(number) + "; expected at most " +
                std::to_string(INT_MAX));
  }
  return static_cast<int>(number);
}

/** @brief An owner of a C object: T names its type, and release, which frees it. */
template <class T, auto release>
class handle {
 public:
  handle() noexcept = default;
  explicit handle(T *owned) noexcept : owned_(owned) {}
  handle(handle &&other) noexcept : owned_(std::exchange(other.owned_, nullptr)) {}
  handle &operator=(handle &&other) noexcept {
    std::swap(owned_, other.owned_);
    return *this;
  }
  handle(const handle &) = delete;
  handle &operator=(const handle &) = delete;
  ~handle() {
    if (owned_ != nullptr) (void)release(owned_);
  }
  T *get() const noexcept { return owned_; }
  T *give_up() noexcept { return std::exchange(owned_, nullptr); }

 private:
  T *owned_ = nullptr;
};

inline const char *text_or_null(const std::string &text) { return text.empty() ? nullptr : text.c_str(); }

}  // namespace detail

/** @brief An element in half precision, by its bits: IEEE binary16. */
struct float16 {
  std::uint16_t bits;
};

/** @brief An element in half precision, by its bits: the upper half of a binary32. */
struct bfloat16 {
  std::uint16_t bits;
};

/** @brief The element type of T; a type without one is an error of the compiler. */
template <class T>
constexpr paddle_element_type element_type_of() {
  using element = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<element, std::int32_t>) return PADDLE_ELEMENT_TYPE_INT32;
  else if constexpr (std::is_same_v<element, std::uint32_t>) return PADDLE_ELEMENT_TYPE_UINT32;
  else if constexpr (std::is_same_v<element, std::int64_t>) return PADDLE_ELEMENT_TYPE_INT64;
  else if constexpr (std::is_same_v<element, std::uint64_t>) return PADDLE_ELEMENT_TYPE_UINT64;
  else if constexpr (std::is_same_v<element, float>) return PADDLE_ELEMENT_TYPE_FLOAT32;
  else if constexpr (std::is_same_v<element, double>) return PADDLE_ELEMENT_TYPE_FLOAT64;
  else if constexpr (std::is_same_v<element, float16>) return PADDLE_ELEMENT_TYPE_FLOAT16;
  else {
    static_assert(std::is_same_v<element, bfloat16>, "the parameter server has no elements of this type");
    return PADDLE_ELEMENT_TYPE_BFLOAT16;
  }
}

/** @brief Elements that lie one after another in memory of another object, as std::span in C++20. */
template <class T>
class span {
 public:
  using element_type = T;
  using value_type = std::remove_cv_t<T>;

  constexpr span() noexcept = default;
  constexpr span(T *data, std::size_t size) noexcept : data_(data), size_(size) {}
  template <std::size_t N>
  constexpr span(T (&array)[N]) noexcept : data_(array), size_(N) {}
  /** @brief The elements of a std::vector, std::array, std::span or anything else with data() and size(). */
  template <class Container, class = std::enable_if_t<std::is_convertible_v<
                                 std::remove_pointer_t<decltype(std::declval<Container &>().data())> (*)[], T (*)[]>>>
  constexpr span(Container &&container) noexcept : data_(container.data()), size_(container.size()) {}

  constexpr T *data() const noexcept { return data_; }
  constexpr std::size_t size() const noexcept { return size_; }
  constexpr std::size_t size_bytes() const noexcept { return size_ * sizeof(T); }
  constexpr bool empty() const noexcept { return size_ == 0; }
  constexpr T *begin() const noexcept { return data_; }
  constexpr T *end() const noexcept { return data_ + size_; }
  constexpr T &operator[](std::size_t index) const { return data_[index]; }

 private:
  T *data_ = nullptr;
  std::size_t size_ = 0;
};

template <class Container>
span(Container &&) -> span<std::remove_pointer_t<decltype(std::declval<Container &>().data())>>;

/** @brief A named tensor in memory of the caller that a call reads: a gradient, an initial value, data of a program.
 * The name is not copied: it must live until the call has returned. */
class gradient {
 public:
  template <class Container, class T = typename decltype(span(std::declval<Container &>()))::value_type>
  gradient(const char *name, Container &&elements) : gradient(name, span<const T>(elements)) {}
  template <class T>
  gradient(const char *name, span<const T> elements)
      : content_{name, element_type_of<T>(), const_cast<T *>(elements.data()), elements.size_bytes(), nullptr, 0} {}
  template <class Container>
  gradient(const std::string &name, Container &&elements)
      : gradient(name.c_str(), std::forward<Container>(elements)) {}

  const paddle_tensor &c_tensor() const noexcept { return content_; }
  /** @brief For calls with lengths of int; throws where this one is longer. */
  paddle_parameter c_type() const {
    return {const_cast<char *>(content_.name), content_.element_type, content_.content,
            detail::narrowed(content_.content_len, content_.name)};
  }

 private:
  paddle_tensor content_;
};

/** @brief A named place in memory of the caller, where a call writes a parameter: exactly as many elements. A place of
 * float16 or bfloat16 gets a parameter of float in half precision. */
class destination {
 public:
  template <class Container, class T = typename decltype(span(std::declval<Container &>()))::value_type>
  destination(const char *name, Container &&elements) : destination(name, span<T>(elements)) {}
  template <class T>
  destination(const char *name, span<T> elements)
      : content_{name, element_type_of<T>(), elements.data(), elements.size_bytes(), nullptr, 0} {}
  template <class Container>
  destination(const std::string &name, Container &&elements)
      : destination(name.c_str(), std::forward<Container>(elements)) {}

  const paddle_tensor &c_tensor() const noexcept { return content_; }
  /** @brief For calls with lengths of int; throws where this one is longer. */
  paddle_parameter c_type() const {
    return {const_cast<char *>(content_.name), content_.element_type, content_.content,
            detail::narrowed(content_.content_len, content_.name)};
  }

 private:
  paddle_tensor content_;
};

/** @brief A gradient, and the place of its parameter's new value. */
struct exchange {
  template <class Sent, class Received>
  exchange(const char *name, Sent &&sent, Received &&received) : sent(name, sent), received(name, received) {}
  template <class Sent, class Received>
  exchange(const std::string &name, Sent &&sent, Received &&received) : exchange(name.c_str(), sent, received) {}

  gradient sent;
  destination received;
};

/** @brief Rows of a sparse parameter by their ids, to be sent (const elements) or fetched. */
class rows {
 public:
  template <class Container, class T = typename decltype(span(std::declval<Container &>()))::value_type>
  rows(const char *name, span<const std::uint64_t> ids, Container &&elements)
      : content_{name,
                 element_type_of<T>(),
                 const_cast<T *>(span(elements).data()),
                 span(elements).size_bytes(),
                 ids.data(),
                 ids.size()} {}

  const paddle_tensor &c_tensor() const noexcept { return content_; }
  /** @brief For calls with lengths of int; throws where this one is longer. */
  paddle_rows c_type() const {
    return {const_cast<char *>(content_.name),
            content_.element_type,
            content_.ids,
            detail::narrowed(content_.ids_len, content_.name),
            content_.content,
            detail::narrowed(content_.content_len, content_.name)};
  }

 private:
  paddle_tensor content_;
};

namespace detail {

/** @brief The C structures of a list of views. */
template <class C, class List>
std::vector<C> c_types(const List &list) {
  std::vector<C> made;
  made.reserve(list.size());
  for (const auto &each : list) made.push_back(each.c_type());
  return made;
}

/** @brief Views as C has them with lengths of 64 bits. */
template <class List>
std::vector<paddle_tensor> c_tensors(const List &list) {
  std::vector<paddle_tensor> made;
  made.reserve(list.size());
  for (const auto &each : list) made.push_back(each.c_tensor());
  return made;
}

/** @brief The arrays of a call with lengths of 64 bits: what it sends, and what it fetches. */
struct transferred {
  template <class Sent, class Received>
  transferred(const Sent &all_sent, const Received &all_received)
      : sent(c_tensors(all_sent)), received(c_tensors(all_received)) {
    if (!sent.empty() && !received.empty() && sent.size() != received.size()) {
      throw error("transfer: found " + std::to_string(sent.size()) + " gradients and " +
                  std::to_string(received.size()) + " places; expected as many");
    }
  }
  const paddle_tensor *grads() const noexcept { return sent.empty() ? nullptr : sent.data(); }
  const paddle_tensor *dst() const noexcept { return received.empty() ? nullptr : received.data(); }
  std::size_t size() const noexcept { return sent.empty() ? received.size() : sent.size(); }

  std::vector<paddle_tensor> sent;
  std::vector<paddle_tensor> received;
};

/** @brief A rate for C. */
inline const double *rate_or_null(const std::optional<double> &rate) { return rate ? &*rate : nullptr; }

/** @brief The two arrays of a call that sends and fetches. */
struct exchanged {
  template <class List>
  explicit exchanged(const List &list) {
    for (const exchange &each : list) {
      sent.push_back(each.sent.c_type());
      received.push_back(each.received.c_type());
    }
  }
  int size() const { return narrowed(sent.size(), "gradients"); }

  std::vector<paddle_gradient> sent;
  std::vector<paddle_parameter> received;
};

}  // namespace detail

/** @brief A call that was started; destroyed without wait() it waits too, and its failure is lost. */
class call {
 public:
  explicit call(paddle_call *started) noexcept : handle_(started) {}
  /** @brief Waits until the call is over. */
  void wait() { detail::checked(paddle_wait(handle_.give_up())); }
  /** @brief Whether the call is over, well or not. */
  bool test() const {
    int done = 0;
    detail::checked(paddle_test(handle_.get(), &done));
    return done == 1;
  }

 private:
  detail::handle<paddle_call, paddle_wait> handle_;
};

/** @brief A parameter of the job. */
struct listed_parameter {
  std::string name;
  paddle_element_type element_type;
  /** @brief Whether it is a table that is sent and fetched by rows. */
  bool is_sparse;
  /** @brief Its length in bytes: of a table, that of all rows that may come to be. */
  std::uint64_t content_len;
  std::vector<std::uint64_t> shape;
  /** @brief How many updates it has. */
  std::uint64_t version;
};

/** @brief The optimizer's state of a parameter or of rows: its tensors, and the updates that it has seen. */
class optimizer_state {
 public:
  explicit optimizer_state(paddle_state *owned) noexcept : handle_(owned) {}
  std::uint64_t updates() const noexcept { return c_type().updates; }
  /** @brief How many tensors there are. */
  std::size_t size() const noexcept { return c_type().tensors_len; }
  std::string name(std::size_t index) const { return c_type().tensors[index].name; }
  /** @brief The elements of a tensor; T is their type, valid as long as this object. */
  template <class T>
  span<const T> elements(std::size_t index) const {
    const paddle_tensor &tensor = c_type().tensors[index];
    if (tensor.element_type != element_type_of<T>()) {
      throw error(std::string(tensor.name) + ": found element type " + std::to_string(tensor.element_type) +
                  "; expected " + std::to_string(element_type_of<T>()));
    }
    return {static_cast<const T *>(tensor.content), tensor.content_len / sizeof(T)};
  }
  const paddle_state &c_type() const noexcept { return *handle_.get(); }

 private:
  detail::handle<paddle_state, paddle_free> handle_;
};

/** @brief Parameters that are read where they are. */
class view {
 public:
  explicit view(paddle_view *owned) noexcept : handle_(owned) {}
  /** @brief How many pieces the parameter with this index has. In order they are the parameter. */
  int pieces(int index) const { return detail::checked(paddle_view_pieces(handle_.get(), index)); }
  /** @brief A piece as elements of T, valid until the view is released. */
  template <class T>
  span<const T> piece(int index, int piece) const {
    const void *content = nullptr;
    std::size_t bytes = 0;
    detail::checked(paddle_view_piece(handle_.get(), index, piece, &content, &bytes));
    return {static_cast<const T *>(content), bytes / sizeof(T)};
  }
  /** @brief Releases the view now. Throws where what was read of it may be of a later version. */
  void release() { detail::checked(paddle_view_release(handle_.give_up())); }

 private:
  detail::handle<paddle_view, paddle_view_release> handle_;
};

/** @brief Page-aligned memory that servers of this machine read in place; T is the type of its elements. */
template <class T>
class buffer {
 public:
  buffer(paddle_pserver_client *client, std::size_t size)
      : client_(client), size_(size), data_(detail::checked(paddle_buffer_alloc(client, size * sizeof(T)))) {}
  buffer(buffer &&other) noexcept
      : client_(other.client_), size_(other.size_), data_(std::exchange(other.data_, nullptr)) {}
  buffer(const buffer &) = delete;
  buffer &operator=(const buffer &) = delete;
  /** @brief Frees the memory; while a call uses it, it stays until the client is released. */
  ~buffer() {
    if (data_ != nullptr) (void)paddle_buffer_free(client_, data_);
  }
  T *data() const noexcept { return static_cast<T *>(data_); }
  std::size_t size() const noexcept { return size_; }
  T &operator[](std::size_t index) const { return data()[index]; }
  T *begin() const noexcept { return data(); }
  T *end() const noexcept { return data() + size_; }

 private:
  paddle_pserver_client *client_;
  std::size_t size_;
  void *data_;
};

/** @brief Memory of the caller, or of a device, that is registered until this object is destroyed. */
class registration {
 public:
  registration(paddle_pserver_client *client, void *memory, std::size_t bytes) : client_(client), memory_(memory) {
    detail::checked(paddle_register_buffer(client, memory, bytes));
  }
  registration(registration &&other) noexcept
      : client_(other.client_), memory_(std::exchange(other.memory_, nullptr)) {}
  registration(const registration &) = delete;
  registration &operator=(const registration &) = delete;
  ~registration() {
    if (memory_ != nullptr) (void)paddle_unregister_buffer(client_, memory_);
  }
  /** @brief Adds memory of another device, as long as this one. */
  void add_replica(void *replica, std::size_t bytes) {
    detail::checked(paddle_register_replica(client_, memory_, replica, bytes));
  }
  /** @brief Unregisters now, and throws where a call or a card still uses the memory. */
  void release() { detail::checked(paddle_unregister_buffer(client_, std::exchange(memory_, nullptr))); }

 private:
  paddle_pserver_client *client_;
  void *memory_;
};

/** @brief A trainer's connection to the parameter servers. */
class client {
 public:
  /** @brief A client that finds servers and rank by the environment. */
  client() : handle_(detail::checked(paddle_new_pserver_client())) {}
  /** @brief A client with options, such as "coordinator=tcp://host:port trainer=3 deadline=30s". */
  explicit client(const std::string &options)
      : handle_(detail::checked(paddle_new_pserver_client_with(options.c_str()))) {}

  /** @brief Whether this trainer is chosen to initialise. Without a configuration the servers' own counts. */
  bool begin_init_params(const std::string &config = {}) {
    return detail::checked(paddle_begin_init_params(get(), detail::text_or_null(config))) == 1;
  }
  /** @brief Declares a parameter as a vector and sends its initial value. */
  void init_param(const gradient &value, const std::string &config = {}) {
    init_param(value, span<const std::uint64_t>(), config);
  }
  /** @brief Declares a parameter of this shape, and sends its initial value. */
  void init_param(const gradient &value, span<const std::uint64_t> shape, const std::string &config = {}) {
    detail::checked(paddle_init_tensor(get(), &value.c_tensor(), shape.data(), shape.size(),
                                       detail::text_or_null(config)));
  }
  void init_param(const gradient &value, std::initializer_list<std::uint64_t> shape, const std::string &config = {}) {
    init_param(value, span<const std::uint64_t>(shape.begin(), shape.size()), config);
  }
  /** @brief Declares a table of rows. */
  template <class T>
  void init_rows(const std::string &name, const std::string &config) {
    detail::checked(paddle_init_rows(get(), name.c_str(), element_type_of<T>(), config.c_str()));
  }
  void finish_init_params() { detail::checked(paddle_finish_init_params(get())); }

  void send_grads(const std::vector<gradient> &grads) {
    const auto sent = detail::c_types<paddle_gradient>(grads);
    detail::checked(paddle_send_grads(get(), sent.data(), detail::narrowed(sent.size(), "gradients")));
  }
  void get_params(const std::vector<destination> &destinations) {
    auto places = detail::c_types<paddle_parameter>(destinations);
    std::vector<const char *> names;
    for (const auto &each : places) names.push_back(each.name);
    detail::checked(
        paddle_get_params(get(), names.data(), places.data(), detail::narrowed(places.size(), "parameters")));
  }
  void push_pull(const std::vector<exchange> &exchanges) {
    detail::exchanged arrays(exchanges);
    detail::checked(paddle_push_pull(get(), arrays.sent.data(), arrays.received.data(), arrays.size()));
  }
  /** @brief Starts push_pull: its memory is the library's until call::wait has returned. */
  [[nodiscard]] call push_pull_start(const std::vector<exchange> &exchanges) {
    detail::exchanged arrays(exchanges);
    paddle_call *started = nullptr;
    detail::checked(
        paddle_push_pull_start(get(), arrays.sent.data(), arrays.received.data(), arrays.size(), &started));
    return call(started);
  }
  /** @brief Sends gradients, fetches parameters, or both, of any length; the rate is for these gradients alone. */
  void transfer(const std::vector<gradient> &sent, const std::vector<destination> &received = {},
                std::optional<double> rate = {}) {
    transfer_of(sent, received, rate);
  }
  /** @brief The same of rows; those that are fetched may be others than those that are sent. */
  void transfer(const std::vector<rows> &sent, const std::vector<rows> &received = {},
                std::optional<double> rate = {}) {
    transfer_of(sent, received, rate);
  }
  /** @brief Starts transfer: its memory is the library's until call::wait has returned. */
  [[nodiscard]] call transfer_start(const std::vector<gradient> &sent, const std::vector<destination> &received = {},
                                    std::optional<double> rate = {}) {
    return transfer_start_of(sent, received, rate);
  }
  [[nodiscard]] call transfer_start(const std::vector<rows> &sent, const std::vector<rows> &received = {},
                                    std::optional<double> rate = {}) {
    return transfer_start_of(sent, received, rate);
  }
  /** @brief Replaces parameters, or rows, by these values. */
  void set_tensors(const std::vector<gradient> &values) { set_tensors_of(values); }
  void set_tensors(const std::vector<rows> &values) { set_tensors_of(values); }
  /** @brief The parameters of the job in the order of their declaration. */
  std::vector<listed_parameter> list_params() {
    paddle_listed_parameter *first = nullptr;
    std::size_t len = 0;
    detail::checked(paddle_list_params(get(), &first, &len));
    const detail::handle<paddle_listed_parameter, paddle_free> released(first);
    std::vector<listed_parameter> listed;
    for (const paddle_listed_parameter *each = first; each != first + len; each++) {
      listed.push_back({each->name, each->element_type, each->is_sparse == 1, each->content_len,
                        std::vector<std::uint64_t>(each->shape, each->shape + each->dimensions), each->version});
    }
    return listed;
  }
  /** @brief The ids of a table's rows that somebody has sent a gradient for. */
  std::vector<std::uint64_t> list_rows(const std::string &name) {
    std::uint64_t *first = nullptr;
    std::size_t len = 0;
    detail::checked(paddle_list_rows(get(), name.c_str(), &first, &len));
    const detail::handle<std::uint64_t, paddle_free> released(first);
    return std::vector<std::uint64_t>(first, first + len);
  }
  /** @brief The optimizer's state of a dense parameter, or of a table's rows with these ids. */
  optimizer_state get_state(const std::string &name, span<const std::uint64_t> ids = {}) {
    return optimizer_state(detail::checked(paddle_get_state(get(), name.c_str(), ids.data(), ids.size())));
  }
  /** @brief Replaces the optimizer's state of a dense parameter, or of rows; is_last as in C. */
  void set_state(const std::string &name, const optimizer_state &state, bool is_last = true) {
    detail::checked(paddle_set_state(get(), name.c_str(), &state.c_type(), is_last ? 1 : 0));
  }
  /** @brief The same of a dense parameter: all its tensors, by their names. */
  void set_state(const std::string &name, const std::vector<gradient> &tensors, std::uint64_t updates) {
    const auto list = detail::c_tensors(tensors);
    const paddle_state state{list.data(), list.size(), updates, nullptr, 0};
    detail::checked(paddle_set_state(get(), name.c_str(), &state, 1));
  }
  [[nodiscard]] view get_params_view(const std::vector<std::string> &names) {
    std::vector<const char *> texts;
    for (const auto &name : names) texts.push_back(name.c_str());
    paddle_view *made = nullptr;
    detail::checked(
        paddle_get_params_view(get(), texts.data(), detail::narrowed(texts.size(), "parameters"), &made));
    return view(made);
  }
  /** @brief Sends gradients of any length, and reads their parameters where they are; types, where there are some, say
   * what each comes as. */
  [[nodiscard]] view transfer_view(const std::vector<gradient> &sent,
                                   const std::vector<paddle_element_type> &types = {},
                                   std::optional<double> rate = {}) {
    if (!types.empty() && types.size() != sent.size()) {
      throw error("transfer_view: found " + std::to_string(sent.size()) + " gradients and " +
                  std::to_string(types.size()) + " types; expected as many");
    }
    const auto list = detail::c_tensors(sent);
    return view(detail::checked(paddle_transfer_view(get(), list.data(), types.empty() ? nullptr : types.data(),
                                                     list.size(), detail::rate_or_null(rate))));
  }
  void send_rows(const std::vector<rows> &sent) {
    const auto list = detail::c_types<paddle_rows>(sent);
    detail::checked(paddle_send_rows(get(), list.data(), detail::narrowed(list.size(), "rows")));
  }
  void get_rows(const std::vector<rows> &fetched) {
    const auto list = detail::c_types<paddle_rows>(fetched);
    detail::checked(paddle_get_rows(get(), list.data(), detail::narrowed(list.size(), "rows")));
  }

  /** @brief Memory for gradients that servers of this machine read in place. */
  template <class T>
  [[nodiscard]] buffer<T> buffer_alloc(std::size_t size) {
    return buffer<T>(get(), size);
  }
  /** @brief Registers memory that is sent from or fetched into again and again. */
  [[nodiscard]] registration register_buffer(void *memory, std::size_t bytes) {
    return registration(get(), memory, bytes);
  }
  /** @brief Whether what is sent from this address is read in place. */
  bool buffer_path(const void *memory) const { return detail::checked(paddle_buffer_path(get(), memory)) == 1; }

  void save_model(const std::string &path) { detail::checked(paddle_save_model(get(), path.c_str())); }
  /** @brief Replaces the values of parameters by those of a safetensors file of this machine. */
  void load_model(const std::string &path) { detail::checked(paddle_load_model(get(), path.c_str())); }
  /** @brief Takes a checkpoint now; the fewest updates that a part of a parameter had when it began. */
  std::uint64_t checkpoint() {
    std::uint64_t version = 0;
    detail::checked(paddle_checkpoint(get(), &version));
    return version;
  }
  /** @brief At which step this trainer goes on whose earlier process has ended, from 0; in mode sync. Called before the
   * first gradient. */
  std::uint64_t resume_rounds() {
    std::uint64_t rounds = 0;
    detail::checked(paddle_resume_rounds(get(), &rounds));
    return rounds;
  }
  /** @brief This trainer's rank. */
  int trainer_id() const { return detail::checked(paddle_trainer_id(get())); }
  /** @brief The number of trainers of the job. */
  int trainers() const { return detail::checked(paddle_trainers(get())); }
  /** @brief The number of servers of the job. */
  int servers() const { return detail::checked(paddle_servers(get())); }
  /** @brief Ends every call of this client that is under way; also from a signal handler. */
  void cancel() noexcept { (void)paddle_cancel(get()); }
  /** @brief This trainer is finished; the others do not wait for it any more. */
  void leave() { detail::checked(paddle_leave(get())); }

  /** @brief The client of C, for calls that this header does not have. It stays this object's. */
  paddle_pserver_client *get() const noexcept { return handle_.get(); }

 private:
  template <class List>
  void set_tensors_of(const List &values) {
    const auto list = detail::c_tensors(values);
    detail::checked(paddle_set_tensors(get(), list.data(), list.size()));
  }
  template <class Sent, class Received>
  void transfer_of(const Sent &sent, const Received &received, const std::optional<double> &rate) {
    const detail::transferred arrays(sent, received);
    detail::checked(
        paddle_transfer(get(), arrays.grads(), arrays.dst(), arrays.size(), detail::rate_or_null(rate)));
  }
  template <class Sent, class Received>
  call transfer_start_of(const Sent &sent, const Received &received, const std::optional<double> &rate) {
    const detail::transferred arrays(sent, received);
    return call(detail::checked(
        paddle_transfer_start(get(), arrays.grads(), arrays.dst(), arrays.size(), detail::rate_or_null(rate))));
  }

  detail::handle<paddle_pserver_client, paddle_pserver_client_release> handle_;
};

/** @brief A program in text, which trains through the servers of a client's job. */
class program {
 public:
  /** @brief Loads a program, a text or the path of a file; batch counts the rows of a step of all trainers. */
  program(client &owner, const std::string &text, const std::string &loss, const std::string &config, int batch)
      : handle_(detail::checked(paddle_program_load(owner.get(), text.c_str(), detail::text_or_null(loss),
                                                    detail::text_or_null(config), batch))) {}

  /** @brief The steps that the job had when the program was loaded. */
  std::int64_t steps_before() const {
    const std::int64_t steps = paddle_program_steps_before(handle_.get());
    if (steps < 0) throw error::last();
    return steps;
  }
  /** @brief Sets data for the next step: this trainer's rows. */
  void feed(const std::vector<gradient> &data) {
    const auto list = detail::c_tensors(data);
    detail::checked(paddle_program_feed(handle_.get(), list.data(), list.size()));
  }
  void step() { detail::checked(paddle_program_step(handle_.get())); }
  /** @brief A scalar of the last step. */
  double value(const std::string &name) const {
    double value = 0.0;
    detail::checked(paddle_program_value(handle_.get(), name.c_str(), &value));
    return value;
  }
  /** @brief A parameter or another variable, whole; T is the type of its elements. */
  template <class T>
  std::vector<T> fetch(const std::string &name) const {
    paddle_tensor place{name.c_str(), element_type_of<T>(), nullptr, 0, nullptr, 0};
    detail::checked(paddle_program_fetch(handle_.get(), &place));
    const detail::handle<void, paddle_free> released(place.content);
    if (place.element_type != element_type_of<T>()) {
      throw error(name + ": found element type " + std::to_string(place.element_type) + "; expected " +
                  std::to_string(element_type_of<T>()));
    }
    const T *first = static_cast<const T *>(place.content);
    return std::vector<T>(first, first + place.content_len / sizeof(T));
  }
  /** @brief The same into memory of the caller. */
  void fetch(const destination &received) const {
    paddle_tensor place = received.c_tensor();
    detail::checked(paddle_program_fetch(handle_.get(), &place));
  }
  /** @brief Saves all parameters as a safetensors file of this machine. */
  void save(const std::string &path) const { detail::checked(paddle_program_save(handle_.get(), path.c_str())); }

 private:
  detail::handle<paddle_program, paddle_program_release> handle_;
};

/** @brief The library's version, such as "0.1.0". */
inline std::string version() { return paddle_version(); }

}  // namespace pserver

#endif
