!> The client library of the parameter server for Fortran 2008: the calls of paddle_pserver.h, edition 3.
!>
!> Functions have the names and the results of C, and paddle_pserver.h describes them: a status of -1 is a failure, and
!> paddle_last_error() has its text. Texts are Fortran's, without an end mark; clients, programs, calls and views are
!> type(c_ptr), and c_associated tells whether one was made.
!>
!> paddle_tensor makes the description of an array, which must be a contiguous target: the library reads and writes the
!> array during the calls that get the description. The type paddle_tensor_t is C's paddle_tensor, for calls with
!> lengths of 64 bits:
!>   paddle_tensor_t(paddle_name("w"), PADDLE_ELEMENT_TYPE_FLOAT32, c_loc(w), 4 * size(w, kind=c_size_t))
!>
!> Compile this file with the program, by the same compiler.
module paddle_pserver
  use, intrinsic :: iso_c_binding
  implicit none
  private

  !> The types of elements.
  integer(c_int), parameter, public :: PADDLE_ELEMENT_TYPE_INT32 = 0
  integer(c_int), parameter, public :: PADDLE_ELEMENT_TYPE_UINT32 = 1
  integer(c_int), parameter, public :: PADDLE_ELEMENT_TYPE_INT64 = 2
  integer(c_int), parameter, public :: PADDLE_ELEMENT_TYPE_UINT64 = 3
  integer(c_int), parameter, public :: PADDLE_ELEMENT_TYPE_FLOAT32 = 4
  integer(c_int), parameter, public :: PADDLE_ELEMENT_TYPE_FLOAT64 = 5
  integer(c_int), parameter, public :: PADDLE_ELEMENT_TYPE_FLOAT16 = 6
  integer(c_int), parameter, public :: PADDLE_ELEMENT_TYPE_BFLOAT16 = 7

  !> Why a call failed, as paddle_last_error_code says.
  integer(c_int), parameter, public :: PADDLE_ERROR_REFUSED = 1
  integer(c_int), parameter, public :: PADDLE_ERROR_NOT_INITIALISED = 2
  integer(c_int), parameter, public :: PADDLE_ERROR_TIMEOUT = 3
  integer(c_int), parameter, public :: PADDLE_ERROR_MISSING_TRAINERS = 4
  integer(c_int), parameter, public :: PADDLE_ERROR_SERVER_LOST = 5
  integer(c_int), parameter, public :: PADDLE_ERROR_CANCELLED = 6
  integer(c_int), parameter, public :: PADDLE_ERROR_INTERNAL = 7

  !> A named tensor, or the gradient of one.
  type, bind(C), public :: paddle_parameter
    type(c_ptr) :: name = c_null_ptr
    integer(c_int) :: element_type = PADDLE_ELEMENT_TYPE_FLOAT32
    type(c_ptr) :: content = c_null_ptr
    integer(c_int) :: content_len = 0
  end type paddle_parameter

  !> Some rows of a sparse parameter, or of its gradient.
  type, bind(C), public :: paddle_rows
    type(c_ptr) :: name = c_null_ptr
    integer(c_int) :: element_type = PADDLE_ELEMENT_TYPE_FLOAT32
    type(c_ptr) :: ids = c_null_ptr
    integer(c_int) :: ids_len = 0
    type(c_ptr) :: content = c_null_ptr
    integer(c_int) :: content_len = 0
  end type paddle_rows

  !> A tensor of the caller, or with ids rows of a sparse parameter. Lengths have 64 bits.
  type, bind(C), public :: paddle_tensor_t
    type(c_ptr) :: name = c_null_ptr
    integer(c_int) :: element_type = PADDLE_ELEMENT_TYPE_FLOAT32
    type(c_ptr) :: content = c_null_ptr
    integer(c_size_t) :: content_len = 0
    type(c_ptr) :: ids = c_null_ptr
    integer(c_size_t) :: ids_len = 0
  end type paddle_tensor_t

  !> A parameter of the job. paddle_text has its name; c_f_pointer(one%shape, dimensions, [one%dimensions]) its shape.
  type, bind(C), public :: paddle_listed_parameter
    type(c_ptr) :: name
    integer(c_int) :: element_type
    integer(c_int) :: is_sparse
    integer(c_int64_t) :: content_len
    type(c_ptr) :: shape
    integer(c_size_t) :: dimensions
    integer(c_int64_t) :: version
  end type paddle_listed_parameter

  !> The optimizer's state: c_f_pointer(state%tensors, list, [state%tensors_len]) makes an array of paddle_tensor_t.
  type, bind(C), public :: paddle_state
    type(c_ptr) :: tensors = c_null_ptr
    integer(c_size_t) :: tensors_len = 0
    integer(c_int64_t) :: updates = 0
    type(c_ptr) :: rates = c_null_ptr
    integer(c_size_t) :: rates_len = 0
  end type paddle_state

  !> A change of a table's learning rate; a negative one is the configured one.
  type, bind(C), public :: paddle_rate_change
    integer(c_int64_t) :: update
    real(c_double) :: learning_rate
  end type paddle_rate_change

  !> The description of an array of the caller, of rank 1 or 2. Arrays of other ranks and types: the fields.
  interface paddle_tensor
    module procedure tensor_of_floats, tensor_of_float_matrix, tensor_of_doubles, tensor_of_double_matrix
    module procedure tensor_of_integers, tensor_of_long_integers
  end interface paddle_tensor

  !> A name that is kept until the program ends.
  type :: kept_name
    character(kind=c_char), pointer :: text(:) => null()
  end type kept_name
  type(kept_name), allocatable, save :: kept_names(:)

  public :: paddle_tensor, paddle_name, paddle_text
  public :: paddle_new_pserver_client, paddle_new_pserver_client_with, paddle_pserver_client_release
  public :: paddle_cancel, paddle_save_model, paddle_leave, paddle_trainer_id, paddle_free
  public :: paddle_last_error, paddle_last_error_code, paddle_strerror, paddle_version
  public :: paddle_load_model, paddle_checkpoint, paddle_resume_rounds, paddle_trainers, paddle_servers
  public :: paddle_init_rows, paddle_send_rows, paddle_get_rows
  public :: paddle_init_tensor, paddle_transfer, paddle_transfer_start, paddle_transfer_view, paddle_set_tensors
  public :: paddle_list_params, paddle_list_rows, paddle_get_state, paddle_set_state
  public :: paddle_program_load, paddle_program_steps_before, paddle_program_feed, paddle_program_step
  public :: paddle_program_value, paddle_program_fetch, paddle_program_save, paddle_program_release
  public :: paddle_begin_init_params, paddle_begin_init_params_n, paddle_finish_init_params
  public :: paddle_init_param, paddle_init_param_n, paddle_init_param_shaped
  public :: paddle_send_grads, paddle_get_params, paddle_push_pull, paddle_parameter_release
  public :: paddle_push_pull_start, paddle_wait, paddle_test
  public :: paddle_buffer_alloc, paddle_buffer_free, paddle_buffer_path
  public :: paddle_register_buffer, paddle_register_replica, paddle_unregister_buffer
  public :: paddle_get_params_view, paddle_get_params_view_as
  public :: paddle_view_pieces, paddle_view_piece, paddle_view_release

  interface
    function paddle_new_pserver_client() bind(C)
      import :: c_ptr
      type(c_ptr) :: paddle_new_pserver_client
    end function
    function c_new_with(options) bind(C, name="paddle_new_pserver_client_with")
      import :: c_ptr
      type(c_ptr), value :: options
      type(c_ptr) :: c_new_with
    end function
    subroutine paddle_pserver_client_release(client) bind(C)
      import :: c_ptr
      type(c_ptr), value :: client
    end subroutine
    integer(c_int) function paddle_cancel(client) bind(C)
      import :: c_ptr, c_int
      type(c_ptr), value :: client
    end function
    integer(c_int) function c_save_model(client, path) bind(C, name="paddle_save_model")
      import :: c_ptr, c_int
      type(c_ptr), value :: client, path
    end function
    integer(c_int) function c_load_model(client, path) bind(C, name="paddle_load_model")
      import :: c_ptr, c_int
      type(c_ptr), value :: client, path
    end function
    integer(c_int) function paddle_checkpoint(client, version) bind(C)
      import :: c_ptr, c_int, c_int64_t
      type(c_ptr), value :: client
      integer(c_int64_t), intent(out) :: version
    end function
    integer(c_int) function paddle_trainers(client) bind(C)
      import :: c_ptr, c_int
      type(c_ptr), value :: client
    end function
    integer(c_int) function paddle_servers(client) bind(C)
      import :: c_ptr, c_int
      type(c_ptr), value :: client
    end function
    integer(c_int) function paddle_resume_rounds(client, rounds) bind(C)
      import :: c_ptr, c_int, c_int64_t
      type(c_ptr), value :: client
      integer(c_int64_t), intent(out) :: rounds
    end function
    integer(c_int) function paddle_last_error_code() bind(C)
      import :: c_int
    end function
    integer(c_int) function paddle_leave(client) bind(C)
      import :: c_ptr, c_int
      type(c_ptr), value :: client
    end function
    integer(c_int) function paddle_trainer_id(client) bind(C)
      import :: c_ptr, c_int
      type(c_ptr), value :: client
    end function
    subroutine paddle_free(memory) bind(C)
      import :: c_ptr
      type(c_ptr), value :: memory
    end subroutine
    function c_last_error() bind(C, name="paddle_last_error")
      import :: c_ptr
      type(c_ptr) :: c_last_error
    end function
    function c_strerror(status) bind(C, name="paddle_strerror")
      import :: c_ptr, c_int
      integer(c_int), value :: status
      type(c_ptr) :: c_strerror
    end function
    function c_version() bind(C, name="paddle_version")
      import :: c_ptr
      type(c_ptr) :: c_version
    end function
    integer(c_int) function c_init_rows(client, name, element_type, config) bind(C, name="paddle_init_rows")
      import :: c_ptr, c_int
      type(c_ptr), value :: client, name, config
      integer(c_int), value :: element_type
    end function
    integer(c_int) function paddle_send_rows(client, grads, len) bind(C)
      import :: c_ptr, c_int, paddle_rows
      type(c_ptr), value :: client
      integer(c_int), value :: len
      type(paddle_rows), intent(in) :: grads(len)
    end function
    integer(c_int) function paddle_get_rows(client, dst, len) bind(C)
      import :: c_ptr, c_int, paddle_rows
      type(c_ptr), value :: client
      integer(c_int), value :: len
      type(paddle_rows), intent(in) :: dst(len)
    end function
    integer(c_int) function c_init_tensor(client, value_of, shape_of, dimensions, config) &
        bind(C, name="paddle_init_tensor")
      import :: c_ptr, c_int, c_int64_t, c_size_t, paddle_tensor_t
      type(c_ptr), value :: client, config
      type(paddle_tensor_t), intent(in) :: value_of
      integer(c_int64_t), intent(in) :: shape_of(*)
      integer(c_size_t), value :: dimensions
    end function
    integer(c_int) function c_transfer(client, grads, dst, len, learning_rate) bind(C, name="paddle_transfer")
      import :: c_ptr, c_int, c_size_t
      type(c_ptr), value :: client, grads, dst, learning_rate
      integer(c_size_t), value :: len
    end function
    function c_transfer_start(client, grads, dst, len, learning_rate) bind(C, name="paddle_transfer_start")
      import :: c_ptr, c_size_t
      type(c_ptr), value :: client, grads, dst, learning_rate
      integer(c_size_t), value :: len
      type(c_ptr) :: c_transfer_start
    end function
    function c_transfer_view(client, grads, element_types, len, learning_rate) bind(C, name="paddle_transfer_view")
      import :: c_ptr, c_size_t
      type(c_ptr), value :: client, grads, element_types, learning_rate
      integer(c_size_t), value :: len
      type(c_ptr) :: c_transfer_view
    end function
    integer(c_int) function paddle_set_tensors(client, values, len) bind(C)
      import :: c_ptr, c_int, c_size_t, paddle_tensor_t
      type(c_ptr), value :: client
      integer(c_size_t), value :: len
      type(paddle_tensor_t), intent(in) :: values(len)
    end function
    !> c_f_pointer(params, list, [len]) makes an array of type(paddle_listed_parameter); paddle_free(params) frees it.
    integer(c_int) function paddle_list_params(client, params, len) bind(C)
      import :: c_ptr, c_int, c_size_t
      type(c_ptr), value :: client
      type(c_ptr), intent(inout) :: params
      integer(c_size_t), intent(inout) :: len
    end function
    integer(c_int) function c_list_rows(client, name, ids, len) bind(C, name="paddle_list_rows")
      import :: c_ptr, c_int, c_size_t
      type(c_ptr), value :: client, name
      type(c_ptr), intent(inout) :: ids
      integer(c_size_t), intent(inout) :: len
    end function
    function c_get_state(client, name, ids, ids_len) bind(C, name="paddle_get_state")
      import :: c_ptr, c_size_t
      type(c_ptr), value :: client, name, ids
      integer(c_size_t), value :: ids_len
      type(c_ptr) :: c_get_state
    end function
    integer(c_int) function c_set_state(client, name, state, is_last) bind(C, name="paddle_set_state")
      import :: c_ptr, c_int, paddle_state
      type(c_ptr), value :: client, name
      type(paddle_state), intent(in) :: state
      integer(c_int), value :: is_last
    end function
    function c_program_load(client, program, loss, config, batch) bind(C, name="paddle_program_load")
      import :: c_ptr, c_int
      type(c_ptr), value :: client, program, loss, config
      integer(c_int), value :: batch
      type(c_ptr) :: c_program_load
    end function
    integer(c_int64_t) function paddle_program_steps_before(program) bind(C)
      import :: c_ptr, c_int64_t
      type(c_ptr), value :: program
    end function
    integer(c_int) function paddle_program_feed(program, data, len) bind(C)
      import :: c_ptr, c_int, c_size_t, paddle_tensor_t
      type(c_ptr), value :: program
      integer(c_size_t), value :: len
      type(paddle_tensor_t), intent(in) :: data(len)
    end function
    integer(c_int) function paddle_program_step(program) bind(C)
      import :: c_ptr, c_int
      type(c_ptr), value :: program
    end function
    integer(c_int) function c_program_value(program, name, value_of) bind(C, name="paddle_program_value")
      import :: c_ptr, c_int, c_double
      type(c_ptr), value :: program, name
      real(c_double), intent(inout) :: value_of
    end function
    integer(c_int) function paddle_program_fetch(program, dst) bind(C)
      import :: c_ptr, c_int, paddle_tensor_t
      type(c_ptr), value :: program
      type(paddle_tensor_t), intent(inout) :: dst
    end function
    integer(c_int) function c_program_save(program, path) bind(C, name="paddle_program_save")
      import :: c_ptr, c_int
      type(c_ptr), value :: program, path
    end function
    subroutine paddle_program_release(program) bind(C)
      import :: c_ptr
      type(c_ptr), value :: program
    end subroutine
    integer(c_int) function c_begin_init_params(client, config) bind(C, name="paddle_begin_init_params")
      import :: c_ptr, c_int
      type(c_ptr), value :: client, config
    end function
    integer(c_int) function paddle_begin_init_params_n(client, config, config_len) bind(C)
      import :: c_ptr, c_int, c_size_t
      type(c_ptr), value :: client, config
      integer(c_size_t), value :: config_len
    end function
    integer(c_int) function paddle_finish_init_params(client) bind(C)
      import :: c_ptr, c_int
      type(c_ptr), value :: client
    end function
    integer(c_int) function c_init_param(client, param, config) bind(C, name="paddle_init_param")
      import :: c_ptr, c_int, paddle_parameter
      type(c_ptr), value :: client, config
      type(paddle_parameter), value :: param
    end function
    integer(c_int) function paddle_init_param_n(client, param, config, config_len) bind(C)
      import :: c_ptr, c_int, c_size_t, paddle_parameter
      type(c_ptr), value :: client, config
      type(paddle_parameter), value :: param
      integer(c_size_t), value :: config_len
    end function
    integer(c_int) function c_init_param_shaped(client, param, shape_of, dimensions, config) &
        bind(C, name="paddle_init_param_shaped")
      import :: c_ptr, c_int, c_int64_t, paddle_parameter
      type(c_ptr), value :: client, config
      type(paddle_parameter), value :: param
      integer(c_int64_t), intent(in) :: shape_of(*)
      integer(c_int), value :: dimensions
    end function
    integer(c_int) function paddle_send_grads(client, grads, len) bind(C)
      import :: c_ptr, c_int, paddle_parameter
      type(c_ptr), value :: client
      integer(c_int), value :: len
      type(paddle_parameter), intent(in) :: grads(len)
    end function
    integer(c_int) function c_get_params(client, names, dst, len) bind(C, name="paddle_get_params")
      import :: c_ptr, c_int, paddle_parameter
      type(c_ptr), value :: client
      integer(c_int), value :: len
      type(c_ptr), intent(in) :: names(len)
      type(paddle_parameter), intent(inout) :: dst(len)
    end function
    integer(c_int) function paddle_push_pull(client, grads, dst, len) bind(C)
      import :: c_ptr, c_int, paddle_parameter
      type(c_ptr), value :: client
      integer(c_int), value :: len
      type(paddle_parameter), intent(in) :: grads(len)
      type(paddle_parameter), intent(inout) :: dst(len)
    end function
    integer(c_int) function paddle_parameter_release(param) bind(C)
      import :: c_int, paddle_parameter
      type(paddle_parameter), intent(inout) :: param
    end function
    integer(c_int) function paddle_push_pull_start(client, grads, dst, len, call_started) bind(C)
      import :: c_ptr, c_int, paddle_parameter
      type(c_ptr), value :: client
      integer(c_int), value :: len
      type(paddle_parameter), intent(in) :: grads(len)
      type(paddle_parameter), intent(inout) :: dst(len)
      type(c_ptr), intent(inout) :: call_started
    end function
    integer(c_int) function paddle_wait(call_started) bind(C)
      import :: c_ptr, c_int
      type(c_ptr), value :: call_started
    end function
    integer(c_int) function paddle_test(call_started, done) bind(C)
      import :: c_ptr, c_int
      type(c_ptr), value :: call_started
      integer(c_int), intent(inout) :: done
    end function
    function paddle_buffer_alloc(client, bytes) bind(C)
      import :: c_ptr, c_size_t
      type(c_ptr), value :: client
      integer(c_size_t), value :: bytes
      type(c_ptr) :: paddle_buffer_alloc
    end function
    integer(c_int) function paddle_buffer_free(client, buffer) bind(C)
      import :: c_ptr, c_int
      type(c_ptr), value :: client, buffer
    end function
    integer(c_int) function paddle_buffer_path(client, memory) bind(C)
      import :: c_ptr, c_int
      type(c_ptr), value :: client, memory
    end function
    integer(c_int) function paddle_register_buffer(client, memory, bytes) bind(C)
      import :: c_ptr, c_int, c_size_t
      type(c_ptr), value :: client, memory
      integer(c_size_t), value :: bytes
    end function
    integer(c_int) function paddle_register_replica(client, memory, replica, bytes) bind(C)
      import :: c_ptr, c_int, c_size_t
      type(c_ptr), value :: client, memory, replica
      integer(c_size_t), value :: bytes
    end function
    integer(c_int) function paddle_unregister_buffer(client, memory) bind(C)
      import :: c_ptr, c_int
      type(c_ptr), value :: client, memory
    end function
    integer(c_int) function paddle_get_params_view(client, names, len, view) bind(C)
      import :: c_ptr, c_int
      type(c_ptr), value :: client
      integer(c_int), value :: len
      type(c_ptr), intent(in) :: names(len)
      type(c_ptr), intent(inout) :: view
    end function
    integer(c_int) function paddle_get_params_view_as(client, names, element_types, len, view) bind(C)
      import :: c_ptr, c_int
      type(c_ptr), value :: client
      integer(c_int), value :: len
      type(c_ptr), intent(in) :: names(len)
      integer(c_int), intent(in) :: element_types(len)
      type(c_ptr), intent(inout) :: view
    end function
    !> Parameters and pieces are counted from 0, as in C.
    integer(c_int) function paddle_view_pieces(view, index) bind(C)
      import :: c_ptr, c_int
      type(c_ptr), value :: view
      integer(c_int), value :: index
    end function
    integer(c_int) function paddle_view_piece(view, index, piece, content, bytes) bind(C)
      import :: c_ptr, c_int, c_size_t
      type(c_ptr), value :: view
      integer(c_int), value :: index, piece
      type(c_ptr), intent(inout) :: content
      integer(c_size_t), intent(inout) :: bytes
    end function
    integer(c_int) function paddle_view_release(view) bind(C)
      import :: c_ptr, c_int
      type(c_ptr), value :: view
    end function
    pure integer(c_size_t) function c_length(text) bind(C, name="strlen")
      import :: c_ptr, c_size_t
      type(c_ptr), value, intent(in) :: text
    end function
  end interface

contains

  !> A name as C has it. Equal names have one copy, which is kept until the program ends.
  function paddle_name(name) result(address)
    character(*), intent(in) :: name
    type(c_ptr) :: address
    type(kept_name), allocatable :: longer(:)
    character(kind=c_char), pointer :: text(:)
    integer :: index
    address = c_null_ptr
    !$omp critical (paddle_pserver_names)
    if (.not. allocated(kept_names)) allocate (kept_names(0))
    do index = 1, size(kept_names)
      text => kept_names(index)%text
      if (size(text) == len(name) + 1) then
        if (all(text == c_text(name))) address = c_loc(text)
      end if
    end do
    if (.not. c_associated(address)) then
      allocate (text(len(name) + 1))
      text = c_text(name)
      allocate (longer(size(kept_names) + 1))
      longer(:size(kept_names)) = kept_names
      longer(size(longer))%text => text
      call move_alloc(longer, kept_names)
      address = c_loc(text)
    end if
    !$omp end critical (paddle_pserver_names)
  end function paddle_name

  !> The characters of a text, and a zero.
  pure function c_text(text) result(characters)
    character(*), intent(in) :: text
    character(kind=c_char) :: characters(len(text) + 1)
    integer :: index
    do index = 1, len(text)
      characters(index) = text(index:index)
    end do
    characters(len(text) + 1) = c_null_char
  end function c_text

  !> The text at an address that the library gave.
  function paddle_text(address) result(text)
    type(c_ptr), intent(in) :: address
    character(:), allocatable :: text
    character(kind=c_char), pointer :: characters(:)
    integer :: index
    call c_f_pointer(address, characters, [c_length(address)])
    allocate (character(size(characters)) :: text)
    do index = 1, size(characters)
      text(index:index) = characters(index)
    end do
  end function paddle_text

  !> Why the last failing call of this thread failed.
  function paddle_last_error() result(text)
    character(:), allocatable :: text
    text = paddle_text(c_last_error())
  end function paddle_last_error

  function paddle_strerror(status) result(text)
    integer(c_int), intent(in) :: status
    character(:), allocatable :: text
    text = paddle_text(c_strerror(status))
  end function paddle_strerror

  function paddle_version() result(text)
    character(:), allocatable :: text
    text = paddle_text(c_version())
  end function paddle_version

  function tensor_of_floats(name, content) result(tensor)
    character(*), intent(in) :: name
    real(c_float), intent(in), contiguous, target :: content(:)
    type(paddle_parameter) :: tensor
    tensor = described(name, PADDLE_ELEMENT_TYPE_FLOAT32, c_loc(content), 4 * size(content, kind=c_size_t))
  end function tensor_of_floats

  function tensor_of_float_matrix(name, content) result(tensor)
    character(*), intent(in) :: name
    real(c_float), intent(in), contiguous, target :: content(:, :)
    type(paddle_parameter) :: tensor
    tensor = described(name, PADDLE_ELEMENT_TYPE_FLOAT32, c_loc(content), 4 * size(content, kind=c_size_t))
  end function tensor_of_float_matrix

  function tensor_of_doubles(name, content) result(tensor)
    character(*), intent(in) :: name
    real(c_double), intent(in), contiguous, target :: content(:)
    type(paddle_parameter) :: tensor
    tensor = described(name, PADDLE_ELEMENT_TYPE_FLOAT64, c_loc(content), 8 * size(content, kind=c_size_t))
  end function tensor_of_doubles

  function tensor_of_double_matrix(name, content) result(tensor)
    character(*), intent(in) :: name
    real(c_double), intent(in), contiguous, target :: content(:, :)
    type(paddle_parameter) :: tensor
    tensor = described(name, PADDLE_ELEMENT_TYPE_FLOAT64, c_loc(content), 8 * size(content, kind=c_size_t))
  end function tensor_of_double_matrix

  function tensor_of_integers(name, content) result(tensor)
    character(*), intent(in) :: name
    integer(c_int32_t), intent(in), contiguous, target :: content(:)
    type(paddle_parameter) :: tensor
    tensor = described(name, PADDLE_ELEMENT_TYPE_INT32, c_loc(content), 4 * size(content, kind=c_size_t))
  end function tensor_of_integers

  function tensor_of_long_integers(name, content) result(tensor)
    character(*), intent(in) :: name
    integer(c_int64_t), intent(in), contiguous, target :: content(:)
    type(paddle_parameter) :: tensor
    tensor = described(name, PADDLE_ELEMENT_TYPE_INT64, c_loc(content), 8 * size(content, kind=c_size_t))
  end function tensor_of_long_integers

  !> A length that C's int does not have becomes negative, which the library refuses.
  function described(name, element_type, content, bytes) result(tensor)
    character(*), intent(in) :: name
    integer(c_int), intent(in) :: element_type
    type(c_ptr), intent(in) :: content
    integer(c_size_t), intent(in) :: bytes
    type(paddle_parameter) :: tensor
    tensor%name = paddle_name(name)
    tensor%element_type = element_type
    tensor%content = content
    tensor%content_len = -1
    if (bytes <= huge(tensor%content_len)) tensor%content_len = int(bytes, c_int)
  end function described

  function paddle_new_pserver_client_with(options) result(client)
    character(*), intent(in) :: options
    type(c_ptr) :: client
    character(kind=c_char), target :: text(len(options) + 1)
    text = c_text(options)
    client = c_new_with(c_loc(text))
  end function paddle_new_pserver_client_with

  integer(c_int) function paddle_save_model(client, path) result(status)
    type(c_ptr), intent(in) :: client
    character(*), intent(in) :: path
    character(kind=c_char), target :: text(len(path) + 1)
    text = c_text(path)
    status = c_save_model(client, c_loc(text))
  end function paddle_save_model

  integer(c_int) function paddle_load_model(client, path) result(status)
    type(c_ptr), intent(in) :: client
    character(*), intent(in) :: path
    character(kind=c_char), target :: text(len(path) + 1)
    text = c_text(path)
    status = c_load_model(client, c_loc(text))
  end function paddle_load_model

  integer(c_int) function paddle_init_rows(client, name, element_type, config) result(status)
    type(c_ptr), intent(in) :: client
    character(*), intent(in) :: name, config
    integer(c_int), intent(in) :: element_type
    character(kind=c_char), target :: text(len(config) + 1)
    text = c_text(config)
    status = c_init_rows(client, paddle_name(name), element_type, c_loc(text))
  end function paddle_init_rows

  !> The shape is in the order of C, the slowest dimension first: that of a Fortran array reversed.
  integer(c_int) function paddle_init_tensor(client, value_of, shape_of, config) result(status)
    type(c_ptr), intent(in) :: client
    type(paddle_tensor_t), intent(in) :: value_of
    integer(c_int64_t), intent(in) :: shape_of(:)
    character(*), intent(in), optional :: config
    character(kind=c_char), allocatable, target :: text(:)
    call keep(config, text)
    status = c_init_tensor(client, value_of, shape_of, size(shape_of, kind=c_size_t), address_of(text))
  end function paddle_init_tensor

  !> Sends gradients that are there, and fetches to places that are there, len of each.
  integer(c_int) function paddle_transfer(client, len, grads, dst, learning_rate) result(status)
    type(c_ptr), intent(in) :: client
    integer(c_size_t), intent(in) :: len
    type(paddle_tensor_t), intent(in), optional, target :: grads(len), dst(len)
    real(c_double), intent(in), optional, target :: learning_rate
    status = c_transfer(client, tensors_at(grads), tensors_at(dst), len, rate_at(learning_rate))
  end function paddle_transfer

  function paddle_transfer_start(client, len, grads, dst, learning_rate) result(call_started)
    type(c_ptr), intent(in) :: client
    integer(c_size_t), intent(in) :: len
    type(c_ptr) :: call_started
    type(paddle_tensor_t), intent(in), optional, target :: grads(len), dst(len)
    real(c_double), intent(in), optional, target :: learning_rate
    call_started = c_transfer_start(client, tensors_at(grads), tensors_at(dst), len, rate_at(learning_rate))
  end function paddle_transfer_start

  !> Without element types the parameters come as their own.
  function paddle_transfer_view(client, len, grads, element_types, learning_rate) result(view)
    type(c_ptr), intent(in) :: client
    integer(c_size_t), intent(in) :: len
    type(c_ptr) :: view
    type(paddle_tensor_t), intent(in), target :: grads(len)
    integer(c_int), intent(in), optional, target :: element_types(len)
    real(c_double), intent(in), optional, target :: learning_rate
    type(c_ptr) :: types
    types = c_null_ptr
    if (present(element_types)) types = c_loc(element_types)
    view = c_transfer_view(client, tensors_at(grads), types, len, rate_at(learning_rate))
  end function paddle_transfer_view

  !> c_f_pointer(ids, list, [len]) makes an array of integer(c_int64_t); paddle_free(ids) frees it.
  integer(c_int) function paddle_list_rows(client, name, ids, len) result(status)
    type(c_ptr), intent(in) :: client
    character(*), intent(in) :: name
    type(c_ptr), intent(inout) :: ids
    integer(c_size_t), intent(inout) :: len
    status = c_list_rows(client, paddle_name(name), ids, len)
  end function paddle_list_rows

  !> With c_f_pointer(found, state) it is a type(paddle_state); paddle_free(found) frees it.
  function paddle_get_state(client, name, ids) result(found)
    type(c_ptr), intent(in) :: client
    character(*), intent(in) :: name
    integer(c_int64_t), intent(in), optional, contiguous, target :: ids(:)
    type(c_ptr) :: found
    if (present(ids)) then
      found = c_get_state(client, paddle_name(name), c_loc(ids), size(ids, kind=c_size_t))
    else
      found = c_get_state(client, paddle_name(name), c_null_ptr, 0_c_size_t)
    end if
  end function paddle_get_state

  integer(c_int) function paddle_set_state(client, name, state, is_last) result(status)
    type(c_ptr), intent(in) :: client
    character(*), intent(in) :: name
    type(paddle_state), intent(in) :: state
    logical, intent(in) :: is_last
    status = c_set_state(client, paddle_name(name), state, merge(1_c_int, 0_c_int, is_last))
  end function paddle_set_state

  !> The address of an array that is there; of none, C's NULL.
  function tensors_at(tensors) result(address)
    type(paddle_tensor_t), intent(in), optional, target :: tensors(*)
    type(c_ptr) :: address
    address = c_null_ptr
    if (present(tensors)) address = c_loc(tensors)
  end function tensors_at

  function rate_at(rate) result(address)
    real(c_double), intent(in), optional, target :: rate
    type(c_ptr) :: address
    address = c_null_ptr
    if (present(rate)) address = c_loc(rate)
  end function rate_at

  !> Without a loss it is the variable "loss"; without a configuration the program has its own optimizer.
  function paddle_program_load(client, program, loss, config, batch) result(loaded)
    type(c_ptr), intent(in) :: client
    character(*), intent(in) :: program
    character(*), intent(in), optional :: loss, config
    integer(c_int), intent(in) :: batch
    type(c_ptr) :: loaded
    character(kind=c_char), allocatable, target :: text(:), loss_text(:), config_text(:)
    call keep(program, text)
    call keep(loss, loss_text)
    call keep(config, config_text)
    loaded = c_program_load(client, c_loc(text), address_of(loss_text), address_of(config_text), batch)
  end function paddle_program_load

  integer(c_int) function paddle_program_value(program, name, value_of) result(status)
    type(c_ptr), intent(in) :: program
    character(*), intent(in) :: name
    real(c_double), intent(inout) :: value_of
    status = c_program_value(program, paddle_name(name), value_of)
  end function paddle_program_value

  integer(c_int) function paddle_program_save(program, path) result(status)
    type(c_ptr), intent(in) :: program
    character(*), intent(in) :: path
    character(kind=c_char), target :: text(len(path) + 1)
    text = c_text(path)
    status = c_program_save(program, c_loc(text))
  end function paddle_program_save

  !> Without a configuration the servers' own counts.
  integer(c_int) function paddle_begin_init_params(client, config) result(status)
    type(c_ptr), intent(in) :: client
    character(*), intent(in), optional :: config
    character(kind=c_char), allocatable, target :: text(:)
    call keep(config, text)
    status = c_begin_init_params(client, address_of(text))
  end function paddle_begin_init_params

  integer(c_int) function paddle_init_param(client, param, config) result(status)
    type(c_ptr), intent(in) :: client
    type(paddle_parameter), intent(in) :: param
    character(*), intent(in), optional :: config
    character(kind=c_char), allocatable, target :: text(:)
    call keep(config, text)
    status = c_init_param(client, param, address_of(text))
  end function paddle_init_param

  !> The shape is in the order of C, the slowest dimension first: that of a Fortran array reversed.
  integer(c_int) function paddle_init_param_shaped(client, param, shape_of, config) result(status)
    type(c_ptr), intent(in) :: client
    type(paddle_parameter), intent(in) :: param
    integer(c_int64_t), intent(in) :: shape_of(:)
    character(*), intent(in), optional :: config
    character(kind=c_char), allocatable, target :: text(:)
    call keep(config, text)
    status = c_init_param_shaped(client, param, shape_of, size(shape_of, kind=c_int), address_of(text))
  end function paddle_init_param_shaped

  !> Fetches the parameters that the descriptions name.
  integer(c_int) function paddle_get_params(client, dst, len) result(status)
    type(c_ptr), intent(in) :: client
    integer(c_int), intent(in) :: len
    type(paddle_parameter), intent(inout) :: dst(len)
    type(c_ptr) :: names(len)
    integer :: index
    do index = 1, len
      names(index) = dst(index)%name
    end do
    status = c_get_params(client, names, dst, len)
  end function paddle_get_params

  !> A copy of a text that is there, for C.
  subroutine keep(text, characters)
    character(*), intent(in), optional :: text
    character(kind=c_char), allocatable, intent(out) :: characters(:)
    if (present(text)) characters = c_text(text)
  end subroutine keep

  !> The address of a copy; of none, C's NULL.
  function address_of(characters) result(address)
    character(kind=c_char), allocatable, target, intent(in) :: characters(:)
    type(c_ptr) :: address
    address = c_null_ptr
    if (allocated(characters)) address = c_loc(characters)
  end function address_of

end module paddle_pserver
