! A trainer in Fortran 2008: several processes teach a network of two layers to read handwritten digits, with gradients
! of their own.
!
!     gfortran $(pkg-config --variable=fortran_module paddle_pserver) digits.f90 \
!         $(pkg-config --libs paddle_pserver) -o digits
!     ./digits digits.csv 4
!
! The arguments are the data (64 pixels and the digit in a line) and the number of trainers, as the servers expect it.
program digits
  use, intrinsic :: iso_c_binding
  use, intrinsic :: iso_fortran_env, only: error_unit
  use paddle_pserver
  implicit none

  integer, parameter :: pixel_count = 64, hidden_count = 32, class_count = 10, batch = 16, epochs = 30

  real(c_float), allocatable :: training(:, :), held_out(:, :)
  integer, allocatable :: training_labels(:), held_out_labels(:)
  real(c_float), target :: weight1(hidden_count, pixel_count), bias1(hidden_count)
  real(c_float), target :: weight2(class_count, hidden_count), bias2(class_count)
  real(c_float), target :: weight1_gradient(hidden_count, pixel_count), bias1_gradient(hidden_count)
  real(c_float), target :: weight2_gradient(class_count, hidden_count), bias2_gradient(class_count)
  type(paddle_parameter) :: layers(4), gradients(4)
  type(c_ptr) :: client
  character(256) :: path, text
  integer :: trainers, trainer, step, each, next, chosen
  integer(c_int64_t) :: done
  integer :: picked(batch)

  if (command_argument_count() /= 2) error stop "expected: digits DATA TRAINERS"
  call get_command_argument(1, path)
  call get_command_argument(2, text)
  read (text, *) trainers
  call read_digits(trim(path))

  client = paddle_new_pserver_client()
  if (.not. c_associated(client)) call fail()
  layers = [paddle_tensor("layer1/weight", weight1), paddle_tensor("layer1/bias", bias1), &
            paddle_tensor("layer2/weight", weight2), paddle_tensor("layer2/bias", bias2)]
  gradients = [paddle_tensor("layer1/weight", weight1_gradient), paddle_tensor("layer1/bias", bias1_gradient), &
               paddle_tensor("layer2/weight", weight2_gradient), paddle_tensor("layer2/bias", bias2_gradient)]

  ! One trainer is chosen to initialise; the others wait here.
  chosen = paddle_begin_init_params(client, &
      "optimizer: SGD sgd { momentum: 0.9 } const_lr { learning_rate: 0.1 }")
  call must(chosen)
  if (chosen == 1) call initialise()
  call must(paddle_get_params(client, layers, 4))
  trainer = paddle_trainer_id(client)
  call must(trainer)

  ! All trainers make the same number of steps. A process that was started again goes on where the earlier one of its
  ! rank has ended.
  call must(paddle_resume_rounds(client, done))
  next = trainer + int(done) * batch * trainers
  do step = int(done) + 1, epochs * size(training_labels) / (batch * trainers)
    do each = 1, batch
      picked(each) = modulo(next, size(training_labels)) + 1
      next = next + trainers
    end do
    call differentiate(training(:, picked), training_labels(picked))
    ! The servers average the gradients of all trainers, update the parameters, and send them back.
    call must(paddle_push_pull(client, gradients, layers, 4))
  end do
  print '("trainer ", i0, ": accuracy ", f0.1, " % on held-out digits")', trainer, 100 * accuracy()
  call must(paddle_leave(client))
  call paddle_pserver_client_release(client)

contains

  subroutine fail()
    write (error_unit, '(a)') paddle_last_error()
    error stop 1
  end subroutine fail

  !> Every call gives -1 when it fails.
  subroutine must(status)
    integer(c_int), intent(in) :: status
    if (status < 0) call fail()
  end subroutine must

  !> The fifth digit of every five is held out.
  subroutine read_digits(path)
    character(*), intent(in) :: path
    integer :: unit, count, status, index, numbers(pixel_count + 1)
    integer, allocatable :: lines(:, :), kept(:)
    open (newunit=unit, file=path, status="old", action="read")
    count = 0
    do
      read (unit, *, iostat=status) numbers
      if (status /= 0) exit
      count = count + 1
    end do
    rewind (unit)
    allocate (lines(pixel_count + 1, count))
    read (unit, *) lines
    close (unit)
    kept = pack([(index, index = 1, count)], [(modulo(index, 5) /= 0, index = 1, count)])
    training = real(lines(:pixel_count, kept)) / 16
    training_labels = lines(pixel_count + 1, kept)
    held_out = real(lines(:pixel_count, 5:count:5)) / 16
    held_out_labels = lines(pixel_count + 1, 5:count:5)
  end subroutine read_digits

  subroutine initialise()
    integer :: index, count
    call random_seed(size=count)
    call random_seed(put=[(index, index = 1, count)])
    call random_number(weight1)
    call random_number(weight2)
    weight1 = 0.4 * (weight1 - 0.5)
    weight2 = 0.4 * (weight2 - 0.5)
    bias1 = 0
    bias2 = 0
    do index = 1, size(layers)
      call must(paddle_init_param(client, layers(index)))
    end do
    call must(paddle_finish_init_params(client))
  end subroutine initialise

  !> Outputs of the first layer, a column for each digit.
  function hidden_of(pixels) result(hidden)
    real(c_float), intent(in) :: pixels(:, :)
    real(c_float) :: hidden(hidden_count, size(pixels, 2))
    hidden = max(matmul(weight1, pixels) + spread(bias1, 2, size(pixels, 2)), 0.0)
  end function hidden_of

  !> The gradients of the mean loss of a batch.
  subroutine differentiate(pixels, labels)
    real(c_float), intent(in) :: pixels(:, :)
    integer, intent(in) :: labels(:)
    real(c_float) :: hidden(hidden_count, batch), error(class_count, batch), back(hidden_count, batch)
    integer :: index
    hidden = hidden_of(pixels)
    error = matmul(weight2, hidden) + spread(bias2, 2, batch)
    error = exp(error - spread(maxval(error, 1), 1, class_count))
    error = error / spread(sum(error, 1), 1, class_count)
    do index = 1, batch
      error(labels(index) + 1, index) = error(labels(index) + 1, index) - 1
    end do
    error = error / batch
    back = merge(matmul(transpose(weight2), error), 0.0, hidden > 0)
    weight2_gradient = matmul(error, transpose(hidden))
    bias2_gradient = sum(error, 2)
    weight1_gradient = matmul(back, transpose(pixels))
    bias1_gradient = sum(back, 2)
  end subroutine differentiate

  function accuracy() result(share)
    real :: share
    real(c_float) :: scores(class_count, size(held_out, 2))
    scores = matmul(weight2, hidden_of(held_out)) + spread(bias2, 2, size(held_out, 2))
    share = real(count(maxloc(scores, 1) - 1 == held_out_labels)) / size(held_out_labels)
  end function accuracy

end program digits
