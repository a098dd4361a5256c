!> A program in text, trained through the module paddle_pserver, against real servers.
program loaded
  use, intrinsic :: iso_c_binding
  use paddle_pserver
  implicit none
  character(*), parameter :: line = new_line("a")
  character(*), parameter :: text = "block 0 {" // line // &
      "data x: float32[batch, 2]" // line // &
      "parameter w: float32[2, 1]" // line // &
      "initialise w = fill(value=0.5)" // line // &
      "forward y = matmul(x, w)" // line // &
      "forward loss = reduce_sum(y)" // line // "}"
  real(c_float), target :: x(4), w(2)
  real(c_float), pointer :: y(:)
  type(paddle_tensor_t) :: fed(1), place, whole
  type(c_ptr) :: client, made
  real(c_double) :: loss

  client = paddle_new_pserver_client()
  made = paddle_program_load(client, text, config="optimizer: SGD const_lr { learning_rate: 0.25 }", batch=2_c_int)
  call check(c_associated(made), "load")
  x = [1.0, 2.0, 3.0, 4.0]
  fed(1) = paddle_tensor_t(paddle_name("x"), PADDLE_ELEMENT_TYPE_FLOAT32, c_loc(x), 16_c_size_t)
  call check(paddle_program_feed(made, fed, 0_c_size_t) == -1, "no data")
  call check(paddle_program_feed(made, fed, 1_c_size_t) == 0, "feed")
  call check(paddle_program_step(made) == 0, "step")
  call check(paddle_program_value(made, "loss", loss) == 0 .and. abs(loss - 5.0) < 1e-6, "the loss of 1.5 and 3.5")
  place = paddle_tensor_t(paddle_name("w"), PADDLE_ELEMENT_TYPE_FLOAT32, c_loc(w), 8_c_size_t)
  call check(paddle_program_fetch(made, place) == 0, "fetch")
  call check(all(abs(w - [-0.5, -1.0]) < 1e-6), "w = 0.5 - 0.25 * [4, 6]")
  place%content_len = 4
  call check(paddle_program_fetch(made, place) == -1, "too short")
  call check(index(paddle_last_error(), "4 bytes of float32; expected 8 bytes") > 0, "its text")
  whole%name = paddle_name("y")
  call check(paddle_program_fetch(made, whole) == 0 .and. whole%content_len == 8, "memory of the library")
  call c_f_pointer(whole%content, y, [2])
  call check(all(abs(y - [1.5, 3.5]) < 1e-6), "y = x * w")
  call paddle_free(whole%content)
  call paddle_program_release(made)
  call check(paddle_leave(client) == 0, "leave")
  call paddle_pserver_client_release(client)

contains

  subroutine check(is_met, what)
    logical, intent(in) :: is_met
    character(*), intent(in) :: what
    if (is_met) return
    print *, what, ": ", paddle_last_error()
    error stop 1
  end subroutine check

end program loaded
