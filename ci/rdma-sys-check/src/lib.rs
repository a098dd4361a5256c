//! Compares the bindings of `transport` with those of `rdma-sys`, type by type, while it compiles: sizes, alignments,
//! offsets and types of fields, values of constants, signatures of functions. A difference is a compile error.
//!
//! Not here: the bindings, and the headers and libclang that `rdma-sys` needs (`cargo ci rdma-sys`). Nothing is linked
//! or run. A type, field, constant or function of ours that no list below names is an error too.

#![deny(dead_code, reason = "a constant or a type that no list names is dead")]
#![allow(deprecated, reason = "rdma-sys marks constants so")]

use std::ffi::c_void;
use std::mem::{align_of, offset_of, size_of};

#[allow(missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals, reason = "a generator wrote it")]
#[path = "../../../transport/src/verbs/sys/bindings.rs"]
mod ours;

#[allow(non_camel_case_types, reason = "names of C")]
mod theirs {
    pub(crate) use libc::{pthread_cond_t, pthread_mutex_t};
    pub(crate) use rdma_sys::*;
    // Types without a name in C, under the names of our generator.
    pub(crate) use rdma_sys::{
        atomic_t as ibv_send_wr__bindgen_ty_2__bindgen_ty_2, bind_mw_t as ibv_send_wr__bindgen_ty_4__bindgen_ty_1,
        bind_mw_tso_union_t as ibv_send_wr__bindgen_ty_4, ibv_async_event_element_t as ibv_async_event__bindgen_ty_1,
        ibv_gid_global_t as ibv_gid__bindgen_ty_1, imm_data_invalidated_rkey_union_t as ibv_wc__bindgen_ty_1,
        imm_data_invalidated_rkey_union_t as ibv_send_wr__bindgen_ty_1, qp_type_t as ibv_send_wr__bindgen_ty_3,
        rdma_t as ibv_send_wr__bindgen_ty_2__bindgen_ty_1, tso_t as ibv_send_wr__bindgen_ty_4__bindgen_ty_2,
        ud_t as ibv_send_wr__bindgen_ty_2__bindgen_ty_3, wr_t as ibv_send_wr__bindgen_ty_2,
        xrc_t as ibv_send_wr__bindgen_ty_3__bindgen_ty_1,
    };
}

/// Exported, so that the compiler takes its methods for used.
pub use ours::Verbs;

/// `Self` is a type of our bindings, and `Theirs` the same type in C.
trait Same<Theirs> {}

/// Compiles if the fields have the same type in C.
const fn same<Ours: Same<Theirs>, Theirs>(_: *const Ours, _: *const Theirs) {}

/// Compiles if the functions have the same signature in C.
fn same_function<Ours: Same<Theirs>, Theirs>(_: &Result<Ours, libloading::Error>, _: Theirs) {}

macro_rules! equal {
    ($($of:ty)*) => { $(impl Same<$of> for $of {})* };
}

macro_rules! function_pointers {
    ($($ours:ident $theirs:ident)*) => {
        impl<$($ours: Same<$theirs>, $theirs,)* Ours: Same<Theirs>, Theirs>
            Same<unsafe extern "C" fn($($theirs),*) -> Theirs> for unsafe extern "C" fn($($ours),*) -> Ours {}
    };
}

macro_rules! layouts {
    ($($name:ident)*) => {
        $(
            impl Same<theirs::$name> for ours::$name {}
            const _: () = {
                assert!(size_of::<ours::$name>() == size_of::<theirs::$name>());
                assert!(align_of::<ours::$name>() == align_of::<theirs::$name>());
            };
        )*
    };
}

macro_rules! unions {
    ($($name:ident { $($field:ident)* $(; $($own:ident = $their:ident),*)? })*) => {
        $(
            layouts! { $name }
            const _: () = {
                $(assert!(offset_of!(ours::$name, $field) == offset_of!(theirs::$name, $field));)*
                $($(assert!(offset_of!(ours::$name, $own) == offset_of!(theirs::$name, $their));)*)?
            };
            const _: fn(&ours::$name, &theirs::$name) = |ours, theirs| {
                $(same(&raw const ours.$field, &raw const theirs.$field);)*
                $($(same(&raw const ours.$own, &raw const theirs.$their);)*)?
            };
        )*
    };
}

macro_rules! structs {
    ($($name:ident { $($field:ident)* $(; $($own:ident = $their:ident),*)? })*) => {
        $(
            unions! { $name { $($field)* $(; $($own = $their),*)? } }
            // Does not compile when a field of ours is not listed.
            const _: fn(ours::$name) = |ours| {
                let ours::$name { $($field: _,)* $($($own: _,)*)? } = ours;
            };
        )*
    };
}

/// Constants of types that `rdma-sys` has as structures around a number, to be joined by "or".
macro_rules! bits {
    ($($of:ident { $($name:ident)* })*) => {
        $($(const _: () = assert!(ours::$name as i64 == theirs::$of::$name.0 as i64);)*)*
    };
}

/// Constants of types that it has as modules or enumerations.
macro_rules! scoped {
    ($($of:ident { $($name:ident)* })*) => {
        $($(const _: () = assert!(ours::$name as i64 == theirs::$of::$name as i64);)*)*
    };
}

macro_rules! constants {
    ($($name:ident)*) => { $(const _: () = assert!(ours::$name as i64 == theirs::$name as i64);)* };
}

macro_rules! functions {
    ($($name:ident($($argument:tt)*))*) => {
        const _: fn(&Verbs) = |ours| {
            $(same_function(&ours.$name, theirs::$name as unsafe extern "C" fn($($argument),*) -> _);)*
        };
        const COMPARED: usize = [$(stringify!($name)),*].len();
    };
}

equal! { () i8 i32 isize u8 u16 u32 u64 usize c_void }
impl<Ours: Same<Theirs>, Theirs> Same<*mut Theirs> for *mut Ours {}
impl<Ours: Same<Theirs>, Theirs> Same<*const Theirs> for *const Ours {}
impl<Ours: Same<Theirs>, Theirs, const N: usize> Same<[Theirs; N]> for [Ours; N] {}
impl<Ours: Same<Theirs>, Theirs> Same<Option<Theirs>> for Option<Ours> {}
// Ours is a number, theirs an enumeration of the same size.
impl Same<theirs::ibv_event_type> for ours::ibv_event_type {}
const _: () = assert!(size_of::<ours::ibv_event_type>() == size_of::<theirs::ibv_event_type>());

function_pointers! {}
function_pointers! { A X }
function_pointers! { A1 B1 A2 B2 }
function_pointers! { A1 B1 A2 B2 A3 B3 }
function_pointers! { A1 B1 A2 B2 A3 B3 A4 B4 }
function_pointers! { A1 B1 A2 B2 A3 B3 A4 B4 A5 B5 }
function_pointers! { A1 B1 A2 B2 A3 B3 A4 B4 A5 B5 A6 B6 }

// Types without members, or with members that only the C library touches.
layouts! {
    _compat_ibv_port_attr pthread_cond_t pthread_mutex_t
}

unions! {
    ibv_gid { raw global }
    ibv_async_event__bindgen_ty_1 { cq qp srq wq port_num }
    ibv_wc__bindgen_ty_1 { imm_data invalidated_rkey }
    ibv_send_wr__bindgen_ty_1 { imm_data; invalidate_rkey = invalidated_rkey }
    ibv_send_wr__bindgen_ty_2 { rdma atomic ud }
    ibv_send_wr__bindgen_ty_3 { xrc }
    ibv_send_wr__bindgen_ty_4 { bind_mw tso }
}

structs! {
    ibv_gid__bindgen_ty_1 { subnet_prefix interface_id }
    ibv_gid_entry { gid gid_index port_num gid_type ndev_ifindex }
    ibv_device_attr {
        fw_ver node_guid sys_image_guid max_mr_size page_size_cap vendor_id vendor_part_id hw_ver max_qp
        max_qp_wr device_cap_flags max_sge max_sge_rd max_cq max_cqe max_mr max_pd max_qp_rd_atom max_ee_rd_atom
        max_res_rd_atom max_qp_init_rd_atom max_ee_init_rd_atom atomic_cap max_ee max_rdd max_mw max_raw_ipv6_qp
        max_raw_ethy_qp max_mcast_grp max_mcast_qp_attach max_total_mcast_qp_attach max_ah max_fmr
        max_map_per_fmr max_srq max_srq_wr max_srq_sge max_pkeys local_ca_ack_delay phys_port_cnt
    }
    ibv_port_attr {
        state max_mtu active_mtu gid_tbl_len port_cap_flags max_msg_sz bad_pkey_cntr qkey_viol_cntr pkey_tbl_len
        lid sm_lid lmc max_vl_num sm_sl subnet_timeout init_type_reply active_width active_speed phys_state
        link_layer flags port_cap_flags2
    }
    ibv_async_event { element event_type }
    ibv_wc {
        wr_id status opcode vendor_err byte_len qp_num src_qp wc_flags pkey_index slid sl dlid_path_bits;
        __bindgen_anon_1 = imm_data_invalidated_rkey_union
    }
    ibv_mw_bind_info { mr addr length mw_access_flags }
    ibv_pd { context handle }
    ibv_mr { context pd addr length handle lkey rkey }
    ibv_mw { context pd rkey handle type_ }
    ibv_global_route { dgid flow_label sgid_index hop_limit traffic_class }
    ibv_ah_attr { grh dlid sl src_path_bits static_rate is_global port_num }
    ibv_srq_attr { max_wr max_sge srq_limit }
    ibv_srq_init_attr { srq_context attr }
    ibv_qp_cap { max_send_wr max_recv_wr max_send_sge max_recv_sge max_inline_data }
    ibv_qp_init_attr { qp_context send_cq recv_cq srq cap qp_type sq_sig_all }
    ibv_qp_attr {
        qp_state cur_qp_state path_mtu path_mig_state qkey rq_psn sq_psn dest_qp_num qp_access_flags cap ah_attr
        alt_ah_attr pkey_index alt_pkey_index en_sqd_async_notify sq_draining max_rd_atomic max_dest_rd_atomic
        min_rnr_timer port_num timeout retry_cnt rnr_retry alt_port_num alt_timeout rate_limit
    }
    ibv_sge { addr length lkey }
    ibv_send_wr {
        wr_id next sg_list num_sge opcode send_flags wr qp_type;
        __bindgen_anon_1 = imm_data_invalidated_rkey_union, __bindgen_anon_2 = bind_mw_tso_union
    }
    ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr rkey }
    ibv_send_wr__bindgen_ty_2__bindgen_ty_2 { remote_addr compare_add swap rkey }
    ibv_send_wr__bindgen_ty_2__bindgen_ty_3 { ah remote_qpn remote_qkey }
    ibv_send_wr__bindgen_ty_3__bindgen_ty_1 { remote_srqn }
    ibv_send_wr__bindgen_ty_4__bindgen_ty_1 { mw rkey bind_info }
    ibv_send_wr__bindgen_ty_4__bindgen_ty_2 { hdr hdr_sz mss }
    ibv_recv_wr { wr_id next sg_list num_sge }
    ibv_mw_bind { wr_id send_flags bind_info }
    ibv_srq { context srq_context pd handle mutex cond events_completed }
    ibv_wq { context wq_context pd cq wq_num handle state wq_type post_recv mutex cond events_completed comp_mask }
    ibv_qp { context qp_context pd send_cq recv_cq srq handle qp_num state qp_type mutex cond events_completed }
    ibv_comp_channel { context fd refcnt }
    ibv_cq { context channel cq_context handle cqe mutex cond comp_events_completed async_events_completed }
    ibv_ah { context pd handle }
    _ibv_device_ops { _dummy1 _dummy2 }
    ibv_device { _ops node_type transport_type name dev_name dev_path ibdev_path }
    ibv_context_ops {
        _compat_query_device _compat_query_port _compat_alloc_pd _compat_dealloc_pd _compat_reg_mr
        _compat_rereg_mr _compat_dereg_mr alloc_mw bind_mw dealloc_mw _compat_create_cq poll_cq req_notify_cq
        _compat_cq_event _compat_resize_cq _compat_destroy_cq _compat_create_srq _compat_modify_srq
        _compat_query_srq _compat_destroy_srq post_srq_recv _compat_create_qp _compat_query_qp _compat_modify_qp
        _compat_destroy_qp post_send post_recv _compat_create_ah _compat_destroy_ah _compat_attach_mcast
        _compat_detach_mcast _compat_async_event
    }
    ibv_context { device ops cmd_fd async_fd num_comp_vectors mutex abi_compat }
}

bits! {
    ibv_device_cap_flags {
        IBV_DEVICE_RESIZE_MAX_WR IBV_DEVICE_BAD_PKEY_CNTR IBV_DEVICE_BAD_QKEY_CNTR IBV_DEVICE_RAW_MULTI
        IBV_DEVICE_AUTO_PATH_MIG IBV_DEVICE_CHANGE_PHY_PORT IBV_DEVICE_UD_AV_PORT_ENFORCE IBV_DEVICE_CURR_QP_STATE_MOD
        IBV_DEVICE_SHUTDOWN_PORT IBV_DEVICE_INIT_TYPE IBV_DEVICE_PORT_ACTIVE_EVENT IBV_DEVICE_SYS_IMAGE_GUID
        IBV_DEVICE_RC_RNR_NAK_GEN IBV_DEVICE_SRQ_RESIZE IBV_DEVICE_N_NOTIFY_CQ IBV_DEVICE_MEM_WINDOW
        IBV_DEVICE_UD_IP_CSUM IBV_DEVICE_XRC IBV_DEVICE_MEM_MGT_EXTENSIONS IBV_DEVICE_MEM_WINDOW_TYPE_2A
        IBV_DEVICE_MEM_WINDOW_TYPE_2B IBV_DEVICE_RC_IP_CSUM IBV_DEVICE_RAW_IP_CSUM IBV_DEVICE_MANAGED_FLOW_STEERING
    }
    ibv_wc_flags {
        IBV_WC_GRH IBV_WC_WITH_IMM IBV_WC_IP_CSUM_OK IBV_WC_WITH_INV IBV_WC_TM_SYNC_REQ IBV_WC_TM_MATCH
        IBV_WC_TM_DATA_VALID
    }
    ibv_access_flags {
        IBV_ACCESS_LOCAL_WRITE IBV_ACCESS_REMOTE_WRITE IBV_ACCESS_REMOTE_READ IBV_ACCESS_REMOTE_ATOMIC
        IBV_ACCESS_MW_BIND IBV_ACCESS_ZERO_BASED IBV_ACCESS_ON_DEMAND IBV_ACCESS_HUGETLB IBV_ACCESS_RELAXED_ORDERING
    }
    ibv_srq_attr_mask { IBV_SRQ_MAX_WR IBV_SRQ_LIMIT }
    ibv_qp_attr_mask {
        IBV_QP_STATE IBV_QP_CUR_STATE IBV_QP_EN_SQD_ASYNC_NOTIFY IBV_QP_ACCESS_FLAGS IBV_QP_PKEY_INDEX IBV_QP_PORT
        IBV_QP_QKEY IBV_QP_AV IBV_QP_PATH_MTU IBV_QP_TIMEOUT IBV_QP_RETRY_CNT IBV_QP_RNR_RETRY IBV_QP_RQ_PSN
        IBV_QP_MAX_QP_RD_ATOMIC IBV_QP_ALT_PATH IBV_QP_MIN_RNR_TIMER IBV_QP_SQ_PSN IBV_QP_MAX_DEST_RD_ATOMIC
        IBV_QP_PATH_MIG_STATE IBV_QP_CAP IBV_QP_DEST_QPN IBV_QP_RATE_LIMIT
    }
    ibv_send_flags { IBV_SEND_FENCE IBV_SEND_SIGNALED IBV_SEND_SOLICITED IBV_SEND_INLINE IBV_SEND_IP_CSUM }
}

scoped! {
    ibv_node_type {
        IBV_NODE_UNKNOWN IBV_NODE_CA IBV_NODE_SWITCH IBV_NODE_ROUTER IBV_NODE_RNIC IBV_NODE_USNIC IBV_NODE_USNIC_UDP
        IBV_NODE_UNSPECIFIED
    }
    ibv_transport_type {
        IBV_TRANSPORT_UNKNOWN IBV_TRANSPORT_IB IBV_TRANSPORT_IWARP IBV_TRANSPORT_USNIC IBV_TRANSPORT_USNIC_UDP
        IBV_TRANSPORT_UNSPECIFIED
    }
    ibv_atomic_cap { IBV_ATOMIC_NONE IBV_ATOMIC_HCA IBV_ATOMIC_GLOB }
    ibv_mtu { IBV_MTU_256 IBV_MTU_512 IBV_MTU_1024 IBV_MTU_2048 IBV_MTU_4096 }
    ibv_port_state { IBV_PORT_NOP IBV_PORT_DOWN IBV_PORT_INIT IBV_PORT_ARMED IBV_PORT_ACTIVE IBV_PORT_ACTIVE_DEFER }
    ibv_event_type {
        IBV_EVENT_CQ_ERR IBV_EVENT_QP_FATAL IBV_EVENT_QP_REQ_ERR IBV_EVENT_QP_ACCESS_ERR IBV_EVENT_COMM_EST
        IBV_EVENT_SQ_DRAINED IBV_EVENT_PATH_MIG IBV_EVENT_PATH_MIG_ERR IBV_EVENT_DEVICE_FATAL IBV_EVENT_PORT_ACTIVE
        IBV_EVENT_PORT_ERR IBV_EVENT_LID_CHANGE IBV_EVENT_PKEY_CHANGE IBV_EVENT_SM_CHANGE IBV_EVENT_SRQ_ERR
        IBV_EVENT_SRQ_LIMIT_REACHED IBV_EVENT_QP_LAST_WQE_REACHED IBV_EVENT_CLIENT_REREGISTER IBV_EVENT_GID_CHANGE
        IBV_EVENT_WQ_FATAL
    }
    ibv_wc_status {
        IBV_WC_SUCCESS IBV_WC_LOC_LEN_ERR IBV_WC_LOC_QP_OP_ERR IBV_WC_LOC_EEC_OP_ERR IBV_WC_LOC_PROT_ERR
        IBV_WC_WR_FLUSH_ERR IBV_WC_MW_BIND_ERR IBV_WC_BAD_RESP_ERR IBV_WC_LOC_ACCESS_ERR IBV_WC_REM_INV_REQ_ERR
        IBV_WC_REM_ACCESS_ERR IBV_WC_REM_OP_ERR IBV_WC_RETRY_EXC_ERR IBV_WC_RNR_RETRY_EXC_ERR IBV_WC_LOC_RDD_VIOL_ERR
        IBV_WC_REM_INV_RD_REQ_ERR IBV_WC_REM_ABORT_ERR IBV_WC_INV_EECN_ERR IBV_WC_INV_EEC_STATE_ERR IBV_WC_FATAL_ERR
        IBV_WC_RESP_TIMEOUT_ERR IBV_WC_GENERAL_ERR IBV_WC_TM_ERR IBV_WC_TM_RNDV_INCOMPLETE
    }
    ibv_wc_opcode {
        IBV_WC_SEND IBV_WC_RDMA_WRITE IBV_WC_RDMA_READ IBV_WC_COMP_SWAP IBV_WC_FETCH_ADD IBV_WC_BIND_MW IBV_WC_LOCAL_INV
        IBV_WC_TSO IBV_WC_ATOMIC_WRITE IBV_WC_RECV IBV_WC_RECV_RDMA_WITH_IMM IBV_WC_TM_ADD IBV_WC_TM_DEL IBV_WC_TM_SYNC
        IBV_WC_TM_RECV IBV_WC_TM_NO_TAG IBV_WC_DRIVER1 IBV_WC_DRIVER2 IBV_WC_DRIVER3
    }
    ibv_mw_type { IBV_MW_TYPE_1 IBV_MW_TYPE_2 }
    ibv_wq_type { IBV_WQT_RQ }
    ibv_wq_state { IBV_WQS_RESET IBV_WQS_RDY IBV_WQS_ERR IBV_WQS_UNKNOWN }
    ibv_qp_type { IBV_QPT_RC IBV_QPT_UC IBV_QPT_UD IBV_QPT_RAW_PACKET IBV_QPT_XRC_SEND IBV_QPT_XRC_RECV IBV_QPT_DRIVER }
    ibv_qp_state {
        IBV_QPS_RESET IBV_QPS_INIT IBV_QPS_RTR IBV_QPS_RTS IBV_QPS_SQD IBV_QPS_SQE IBV_QPS_ERR IBV_QPS_UNKNOWN
    }
    ibv_mig_state { IBV_MIG_MIGRATED IBV_MIG_REARM IBV_MIG_ARMED }
    ibv_wr_opcode {
        IBV_WR_RDMA_WRITE IBV_WR_RDMA_WRITE_WITH_IMM IBV_WR_SEND IBV_WR_SEND_WITH_IMM IBV_WR_RDMA_READ
        IBV_WR_ATOMIC_CMP_AND_SWP IBV_WR_ATOMIC_FETCH_AND_ADD IBV_WR_LOCAL_INV IBV_WR_BIND_MW IBV_WR_SEND_WITH_INV
        IBV_WR_TSO IBV_WR_DRIVER1 IBV_WR_ATOMIC_WRITE
    }
}

constants! {
    IBV_GID_TYPE_IB IBV_GID_TYPE_ROCE_V1 IBV_GID_TYPE_ROCE_V2 IBV_FORK_DISABLED IBV_FORK_ENABLED IBV_FORK_UNNEEDED
}

functions! {
    ibv_wc_status_str(_) ibv_get_device_list(_) ibv_free_device_list(_) ibv_get_device_name(_) ibv_get_device_guid(_)
    ibv_open_device(_) ibv_close_device(_) ibv_get_async_event(_ _) ibv_ack_async_event(_) ibv_query_device(_ _)
    ibv_query_port(_ _ _) ibv_query_gid(_ _ _ _) ibv_alloc_pd(_) ibv_dealloc_pd(_) ibv_reg_mr_iova2(_ _ _ _ _)
    ibv_reg_mr(_ _ _ _) ibv_reg_dmabuf_mr(_ _ _ _ _ _) ibv_dereg_mr(_) ibv_create_comp_channel(_)
    ibv_destroy_comp_channel(_) ibv_create_cq(_ _ _ _ _) ibv_destroy_cq(_) ibv_get_cq_event(_ _ _)
    ibv_ack_cq_events(_ _) ibv_create_srq(_ _) ibv_modify_srq(_ _ _) ibv_destroy_srq(_) ibv_create_qp(_ _)
    ibv_modify_qp(_ _ _) ibv_query_qp(_ _ _ _) ibv_destroy_qp(_) ibv_fork_init() ibv_is_fork_initialized()
    ibv_port_state_str(_) ibv_event_type_str(_)
}

/// `rdma-sys` leaves out constants of an enumeration without a name in C.
const _: [u32; 3] = [ours::IBV_LINK_LAYER_UNSPECIFIED, ours::IBV_LINK_LAYER_INFINIBAND, ours::IBV_LINK_LAYER_ETHERNET];
/// `rdma-sys` leaves out functions whose names begin with `_`: `_ibv_query_gid_ex` and `_ibv_query_gid_table`.
const LEFT_OUT: usize = 2;
type Function = Result<unsafe extern "C" fn(), libloading::Error>;
const _: () =
    assert!(size_of::<Verbs>() == size_of::<libloading::Library>() + (COMPARED + LEFT_OUT) * size_of::<Function>());
