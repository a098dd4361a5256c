!> The calls with lengths of 64 bits of the module paddle_pserver, against real servers.
program faces
  use, intrinsic :: iso_c_binding
  use paddle_pserver
  implicit none
  real(c_float), target :: w(6), gradient(6), fetched(6), rows(4), other(2)
  integer(c_int64_t), target :: ids(2), wanted(1)
  real(c_double) :: rate
  type(paddle_tensor_t), target :: given(1), place(1)
  type(paddle_tensor_t), pointer :: states(:)
  type(paddle_listed_parameter), pointer :: listed(:)
  type(paddle_state), pointer :: state
  integer(c_int64_t), pointer :: dimensions(:), listed_ids(:)
  real(c_float), pointer :: velocity(:), shown(:)
  type(c_ptr) :: client, memory, started, view
  integer(c_size_t) :: count
  integer(c_int) :: status

  client = paddle_new_pserver_client()
  w = 1.0
  gradient = 2.0
  given = whole("w", w)
  call check(paddle_begin_init_params(client, "optimizer: SGD const_lr { learning_rate: 0.5 }") == 1, "begin")
  status = paddle_init_tensor(client, given(1), [2_c_int64_t, 3_c_int64_t], &
      "optimizer: SGD const_lr { learning_rate: 0.5 } sgd { momentum: 0.5 }")
  call check(status == 0, "init")
  status = paddle_init_rows(client, "table", PADDLE_ELEMENT_TYPE_FLOAT32, "sparse { height: 9 width: 2 }")
  call check(status == 0, "init rows")
  call check(paddle_finish_init_params(client) == 0, "finish")

  rate = 0.25
  given = whole("w", gradient)
  place = whole("w", fetched)
  call check(paddle_transfer(client, 1_c_size_t, given, place, rate) == 0, "transfer")
  call check(all(abs(fetched - 0.5) < 1e-6), "w = 1 - 0.25 * 2")
  call check(paddle_transfer(client, 1_c_size_t, grads=given) == 0, "send")
  started = paddle_transfer_start(client, 1_c_size_t, dst=place)
  call check(paddle_wait(started) == 0, "wait")
  call check(all(abs(fetched + 0.75) < 1e-6), "w = 0.5 - (0.5 * 0.5 + 0.5 * 2)")
  call check(paddle_transfer(client, 1_c_size_t) == -1, "nothing")
  call check(index(paddle_last_error(), "grads and dst are NULL") > 0, "its text")

  ids = [7, 2]
  wanted = 2
  rows = [1.0, 2.0, 3.0, 4.0]
  given = table(ids, rows)
  place = table(wanted, other)
  call check(paddle_transfer(client, 1_c_size_t, given, place) == 0, "rows")
  call check(all(abs(other - [-1.5, -2.0]) < 1e-6), "a row")

  call check(paddle_list_params(client, memory, count) == 0, "list")
  call check(count == 2, "two parameters")
  call c_f_pointer(memory, listed, [count])
  call c_f_pointer(listed(1)%shape, dimensions, [listed(1)%dimensions])
  call check(paddle_text(listed(1)%name) == "w" .and. all(dimensions == [2, 3]), "the first")
  call check(listed(1)%version == 2 .and. listed(2)%is_sparse == 1 .and. listed(2)%content_len == 72, "the second")
  call paddle_free(memory)

  memory = paddle_get_state(client, "w")
  call c_f_pointer(memory, state)
  call check(state%updates == 2 .and. state%tensors_len == 1, "state")
  call c_f_pointer(state%tensors, states, [state%tensors_len])
  call c_f_pointer(states(1)%content, velocity, [6])
  call check(all(abs(velocity + 1.25) < 1e-6), "v = 0.5 * -0.5 - 0.5 * 2")
  state%updates = 9
  call check(paddle_set_state(client, "w", state, .true.) == 0, "set state")
  call paddle_free(memory)
  memory = paddle_get_state(client, "w")
  call c_f_pointer(memory, state)
  call check(state%updates == 9, "as it was set")
  call paddle_free(memory)
  memory = paddle_get_state(client, "table", ids)
  call c_f_pointer(memory, state)
  call check(state%updates == 1, "state of rows")
  call paddle_free(memory)
  call check(paddle_list_rows(client, "table", memory, count) == 0, "list rows")
  call c_f_pointer(memory, listed_ids, [count])
  call check(all(listed_ids == [2, 7]), "two rows")
  call paddle_free(memory)
  given = whole("w", w)
  call check(paddle_set_tensors(client, given, 1_c_size_t) == 0, "set")
  place = whole("w", fetched)
  call check(paddle_transfer(client, 1_c_size_t, dst=place) == 0, "fetch")
  call check(all(abs(fetched - 1.0) < 1e-6), "the value that was set")

  given = whole("w", gradient)
  call check(.not. c_associated(paddle_transfer_view(client, 0_c_size_t, given)), "no gradients")
  call check(index(paddle_last_error(), "grads: length 0") > 0, "its text")
  view = paddle_transfer_view(client, 1_c_size_t, given, learning_rate=rate)
  call check(c_associated(view), "view")
  call check(paddle_view_piece(view, 0_c_int, 0_c_int, memory, count) == 0 .and. count == 24, "its piece")
  call c_f_pointer(memory, shown, [6])
  call check(all(abs(shown + 0.125) < 1e-6), "w = 1 + 0.5 * -1.25 - 0.25 * 2")
  call check(paddle_view_release(view) == 0, "release")
  view = paddle_transfer_view(client, 1_c_size_t, given, [PADDLE_ELEMENT_TYPE_FLOAT16])
  call check(c_associated(view), "view of halves")
  call check(paddle_view_piece(view, 0_c_int, 0_c_int, memory, count) == 0 .and. count == 12, "half as long")
  call check(paddle_view_release(view) == 0, "release halves")
  call check(paddle_leave(client) == 0, "leave")
  call paddle_pserver_client_release(client)

contains

  function whole(name, content) result(tensor)
    character(*), intent(in) :: name
    real(c_float), intent(in), target, contiguous :: content(:)
    type(paddle_tensor_t) :: tensor
    tensor = paddle_tensor_t(paddle_name(name), PADDLE_ELEMENT_TYPE_FLOAT32, c_loc(content), &
        4 * size(content, kind=c_size_t))
  end function whole

  function table(which, content) result(tensor)
    integer(c_int64_t), intent(in), target, contiguous :: which(:)
    real(c_float), intent(in), target, contiguous :: content(:)
    type(paddle_tensor_t) :: tensor
    tensor = whole("table", content)
    tensor%ids = c_loc(which)
    tensor%ids_len = size(which, kind=c_size_t)
  end function table

  subroutine check(is_met, what)
    logical, intent(in) :: is_met
    character(*), intent(in) :: what
    if (is_met) return
    print *, what, ": ", paddle_last_error()
    error stop 1
  end subroutine check

end program faces
