//! Our nftables table, which keeps the CNI's netfilter rules off the packets that we forward.
//!
//! ```text
//! table ip reweave-lb {
//!     chain postrouting {
//!         type nat hook postrouting priority srcnat - 10; policy accept;
//!         meta mark 0xfb000000/8 snat to ip saddr
//!     }
//!     chain prerouting {                                              # only where bridges bypass netfilter
//!         type filter hook prerouting priority raw; policy accept;
//!         iifname "weave" meta mark != 0x00000000/8 meta mark != 0xfb000000/8 meta mark != 0xfc000000/6 notrack
//!     }
//! }
//! ```
//!
//! The first rule is a source NAT to the address that the packet already has. A connection has one source NAT: with
//! this one decided, ten before the priority of iptables, the CNI's masquerade is not asked. Seen on kernel 6.18,
//! client – router with the bridge – pod, and `! -s 10.32.0.0/16 -d 10.32.0.0/16 -j MASQUERADE` on the router:
//! without the table (or with another mark) the pod saw the router, 10.32.0.1; with it the pod saw the client,
//! 192.0.2.2:40001, and conntrack held a plain, assured connection. `tests/node_kernel/nft.rs` repeats it.
//!
//! The second rule is for nodes where netfilter does not see bridged frames (`bridge-nf-call-iptables` off):
//! conntrack has then never met the forward, and rules such as `ct state invalid drop` would take the answer for a
//! stray. Untracked packets are not invalid. Where bridged frames are seen it would do harm, and is absent.
//!
//! The messages go to the kernel directly: the agent's image holds one static binary, and no `nft` beside it.
//! (`rustables` was looked at: GPL, and it needs libclang to build; `nftnl` needs a C library.)

use super::netfilter::{FIRST_OF_BATCH, Socket};
use lb_common::mark;
use netlink_bindings::nftables::{
    BitwiseOps, Chained, CmpOps, ExprOps, IterableChainAttrs, IterableExprAttrs, IterableRuleAttrs, MetaKeys,
    NatRangeFlags, Nfgenmsg, PayloadBase, PushExprListAttrs, Registers, Request,
};
use netlink_bindings::traits::Pusher;
use netlink_bindings::utils::ErrorContext;
use std::ffi::{CStr, CString};
use std::io;

/// The table's name, in the family `ip`.
pub const TABLE: &CStr = c"reweave-lb";
const POSTROUTING: &CStr = c"postrouting";
const PREROUTING: &CStr = c"prerouting";
/// How far before the nat chains of iptables and of most others (`srcnat`) ours runs.
const BEFORE_SRCNAT: i32 = 10;

/// The bits that all marks above [`mark::FORWARDED`] have and no other mark has: 252 to 255.
const ABOVE: u8 = 0xfc;
const _: () = assert!(mark::FORWARDED == mark::MAX_HOLDERS + 1 && ABOVE == mark::FORWARDED + 1);

/// Talking to nf_tables failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel did not take a request.
    #[error("nftables: cannot {action} the table ip reweave-lb: {source}")]
    Netlink {
        /// What was tried.
        action: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// An interface's name with a zero byte.
    #[error("nftables: {name:?} is not an interface's name")]
    Name {
        /// The name.
        name: String,
    },
}

/// A table, as far as ours needs it; anything else that is found in one is [`Expression::Other`] or `extra`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    chains: Vec<Chain>,
    /// Chains, sets or objects that are not in `chains`.
    extra: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Chain {
    name: CString,
    kind: CString,
    hook: u32,
    priority: i32,
    policy: u32,
    rules: Vec<Vec<Expression>>,
}

/// Steps of a rule. All of them use the first register.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Expression {
    LoadMark,
    LoadInputName,
    LoadSourceAddress,
    /// `register & mask`.
    Mask(u32),
    Compare(Comparison, Vec<u8>),
    /// Source NAT to the address in the register.
    SourceNat,
    NoTrack,
    /// Nothing that we write.
    Other(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    Equal,
    Unequal,
}

/// The one thing there is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Put this table in place of what is there, in one transaction.
    Replace(Table),
    /// Remove the table.
    Delete,
}

impl Table {
    /// The table that a node should have.
    ///
    /// `mark_shift` is [`lb_common::config::Config::mark_shift`]. `untracked` names the pods' device where netfilter
    /// does not see bridged frames (see [`super::sysctl::bridges_call_iptables`]).
    ///
    /// # Errors
    /// A name with a zero byte in it.
    pub fn wanted(mark_shift: u32, untracked: Option<&str>) -> Result<Self, Error> {
        let byte = |value: u8| (u32::from(value) << mark_shift).to_ne_bytes().to_vec();
        let mut chains = vec![Chain {
            name: POSTROUTING.to_owned(),
            kind: c"nat".to_owned(),
            hook: unsigned(libc::NF_INET_POST_ROUTING),
            priority: libc::NF_IP_PRI_NAT_SRC - BEFORE_SRCNAT,
            policy: unsigned(libc::NF_ACCEPT),
            rules: vec![vec![
                Expression::LoadMark,
                Expression::Mask(0xff << mark_shift),
                Expression::Compare(Comparison::Equal, byte(mark::FORWARDED)),
                Expression::LoadSourceAddress,
                Expression::SourceNat,
            ]],
        }];
        if let Some(device) = untracked {
            // The kernel compares whole names, with zeros up to the size of the field.
            let mut name = device.as_bytes().to_vec();
            if name.contains(&0) || name.len() >= libc::IFNAMSIZ {
                return Err(Error::Name { name: device.to_owned() });
            }
            name.resize(libc::IFNAMSIZ, 0);
            let mut untrack = vec![Expression::LoadInputName, Expression::Compare(Comparison::Equal, name)];
            // Which leaves the marks of holders. Not as a range: nf_tables orders bytes, not numbers, and what `nft`
            // makes of that for a mark cannot be read in again from a saved ruleset.
            for (mask, value) in [(0xff, 0), (0xff, mark::FORWARDED), (ABOVE, ABOVE)] {
                untrack.extend([
                    Expression::LoadMark,
                    Expression::Mask(u32::from(mask) << mark_shift),
                    Expression::Compare(Comparison::Unequal, byte(value)),
                ]);
            }
            untrack.push(Expression::NoTrack);
            chains.push(Chain {
                name: PREROUTING.to_owned(),
                kind: c"filter".to_owned(),
                hook: unsigned(libc::NF_INET_PRE_ROUTING),
                priority: libc::NF_IP_PRI_RAW,
                policy: unsigned(libc::NF_ACCEPT),
                rules: vec![untrack],
            });
        }
        Ok(Self { chains, extra: false })
    }
}

/// What leads from the observed table to the wanted one (none: no table).
pub fn plan(wanted: Option<&Table>, observed: Option<&Table>) -> Option<Operation> {
    match (wanted, observed) {
        (wanted, observed) if wanted == observed => None,
        (Some(wanted), _) => Some(Operation::Replace(wanted.clone())),
        (None, _) => Some(Operation::Delete),
    }
}

/// Reads our table.
///
/// # Errors
/// The kernel refuses.
pub async fn observe() -> Result<Option<Table>, Error> {
    read_table().await.map_err(|source| Error::Netlink { action: "read", source })
}

/// Does it, as one transaction: a packet meets the old table or the new one.
///
/// # Errors
/// The kernel refuses; nothing has changed then.
pub async fn apply(operation: &Operation) -> Result<(), Error> {
    let (action, table) = match operation {
        Operation::Replace(table) => ("write", Some(table)),
        Operation::Delete => ("remove", None),
    };
    write_table(table).await.map_err(|source| Error::Netlink { action, source })
}

/// Brings the table to what is wanted; says what was done.
///
/// # Errors
/// The kernel refuses.
pub async fn ensure(wanted: &Table) -> Result<Option<Operation>, Error> {
    let operation = plan(Some(wanted), observe().await?.as_ref());
    if let Some(operation) = &operation {
        apply(operation).await?;
    }
    Ok(operation)
}

/// Removes our table, if it is there; says whether it was.
///
/// # Errors
/// The kernel refuses.
pub async fn remove() -> Result<bool, Error> {
    let operation = plan(None, observe().await?.as_ref());
    if let Some(operation) = &operation {
        apply(operation).await?;
    }
    Ok(operation.is_some())
}

/// Our table only: other programs' may hold tens of thousands of chains.
async fn read_table() -> io::Result<Option<Table>> {
    let socket = Socket::open()?;
    let mut request = Request::new().op_gettable_do(&family());
    request.encode().push_name(TABLE);
    let members = match socket.request(&request, |(_, table)| table.get_use().map_err(broken)).await {
        Ok(replies) => {
            replies.into_iter().next().unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()))?
        }
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
        Err(error) => return Err(error),
    };

    let mut chains = Vec::new();
    for name in [POSTROUTING, PREROUTING] {
        let mut request = Request::new().op_getchain_do(&family());
        request.encode().push_table(TABLE).push_name(name);
        match socket.request(&request, |(_, chain)| decode_chain(name, &chain)).await {
            Ok(found) => chains.extend(found),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            Err(error) => return Err(error),
        }
    }

    let mut request = Request::new().op_getrule_dump(&family());
    request.encode().push_table(TABLE);
    for rule in socket.request(&request, |(_, rule)| decode_rule(&rule)).await? {
        let (table, chain, expressions) = rule?;
        // Kernels that do not filter the dump answer with every table's rules.
        if table.as_c_str() == TABLE
            && let Some(chain) = chains.iter_mut().find(|c| c.name == chain)
        {
            chain.rules.push(expressions);
        }
    }
    let extra = usize::try_from(members).map_err(io::Error::other)? != chains.len();
    Ok(Some(Table { chains, extra }))
}

fn decode_chain(name: &CStr, chain: &IterableChainAttrs<'_>) -> Chain {
    // A chain without hook or policy is not ours, and compares unequal to every one that we want.
    let hook = chain.get_hook();
    Chain {
        name: name.to_owned(),
        kind: chain.get_type().map(CStr::to_owned).unwrap_or_default(),
        hook: hook.as_ref().ok().and_then(|h| h.get_num().ok()).unwrap_or(u32::MAX),
        priority: hook.as_ref().ok().and_then(|h| h.get_priority().ok()).unwrap_or(i32::MAX),
        policy: chain.get_policy().unwrap_or(u32::MAX),
        rules: Vec::new(),
    }
}

fn decode_rule(rule: &IterableRuleAttrs<'_>) -> io::Result<(CString, CString, Vec<Expression>)> {
    let table = rule.get_table().map_err(broken)?.to_owned();
    let chain = rule.get_chain().map_err(broken)?.to_owned();
    let expressions = match rule.get_expressions() {
        Ok(list) => list.get_elem().map(|expression| decode_expression(&expression)).collect(),
        Err(_) => Vec::new(),
    };
    Ok((table, chain, expressions))
}

fn decode_expression(expression: &IterableExprAttrs<'_>) -> Expression {
    let name = expression.get_name().map(CStr::to_string_lossy).unwrap_or_default().into_owned();
    let known = match expression.get_data() {
        Err(_) if name == "notrack" => Some(Expression::NoTrack),
        Err(_) => None,
        Ok(data) => decode_data(&data),
    };
    known.unwrap_or(Expression::Other(name))
}

/// None for everything that [`encode`] does not write.
fn decode_data(data: &ExprOps<'_>) -> Option<Expression> {
    const REGISTER: Option<u32> = Some(Registers::Reg1 as u32);
    match data {
        ExprOps::Meta(meta) if meta.get_dreg().ok() == REGISTER => match meta.get_key().ok()? {
            key if key == MetaKeys::Mark as u32 => Some(Expression::LoadMark),
            key if key == MetaKeys::Iifname as u32 => Some(Expression::LoadInputName),
            _ => None,
        },
        ExprOps::Bitwise(bitwise) => {
            // Kernels before 5.6 know no other operation, and do not name this one.
            let is_mask = bitwise.get_op().is_ok_and(|op| op == BitwiseOps::MaskXor as u32)
                || bitwise.get_op().is_err();
            let keeps_the_rest = bitwise.get_xor().ok()?.get_value().ok()? == [0; 4];
            let in_place = bitwise.get_sreg().ok() == REGISTER && bitwise.get_dreg().ok() == REGISTER;
            let mask = bitwise.get_mask().ok()?.get_value().ok()?.try_into().ok()?;
            (is_mask && keeps_the_rest && in_place).then(|| Expression::Mask(u32::from_ne_bytes(mask)))
        }
        ExprOps::Cmp(compare) if compare.get_sreg().ok() == REGISTER => {
            let comparison = Comparison::from_kernel(compare.get_op().ok()?)?;
            Some(Expression::Compare(comparison, compare.get_data().ok()?.get_value().ok()?.to_vec()))
        }
        ExprOps::Payload(payload) => {
            let is_source = payload.get_dreg().ok() == REGISTER
                && payload.get_base().ok() == Some(PayloadBase::NetworkHeader as u32)
                && payload.get_offset().ok() == Some(SOURCE_ADDRESS.0)
                && payload.get_len().ok() == Some(SOURCE_ADDRESS.1);
            is_source.then_some(Expression::LoadSourceAddress)
        }
        ExprOps::Nat(nat) => {
            let is_ours = nat.get_type().ok() == Some(unsigned(libc::NFT_NAT_SNAT))
                && nat.get_reg_addr_min().ok() == REGISTER
                && nat.get_reg_addr_max().ok() == REGISTER
                && nat.get_reg_proto_min().is_err()
                && nat.get_flags().ok() == Some(NatRangeFlags::MapIps as u32);
            is_ours.then_some(Expression::SourceNat)
        }
        _ => None,
    }
}

/// Offset and length of the source address in an IPv4 header, in bytes.
const SOURCE_ADDRESS: (u32, u32) = (12, 4);

impl Comparison {
    const fn kernel(self) -> u32 {
        match self {
            Self::Equal => CmpOps::Eq as u32,
            Self::Unequal => CmpOps::Neq as u32,
        }
    }

    fn from_kernel(number: u32) -> Option<Self> {
        [Self::Equal, Self::Unequal].into_iter().find(|c| c.kernel() == number)
    }
}

async fn write_table(table: Option<&Table>) -> io::Result<()> {
    let mut batch = Chained::new(FIRST_OF_BATCH);
    batch.request().op_batch_begin_do(&bracket());
    // Made first, so that there is one to delete; deleted, so that nothing of it stays.
    batch.request().set_create().op_newtable_do(&family()).encode().push_name(TABLE);
    batch.request().op_deltable_do(&family()).encode().push_name(TABLE);
    if let Some(table) = table {
        batch.request().set_create().op_newtable_do(&family()).encode().push_name(TABLE);
        for chain in &table.chains {
            encode_chain(&mut batch, chain);
        }
    }
    batch.request().op_batch_end_do(&bracket());
    Socket::open()?.batch(&batch.finalize()).await
}

fn encode_chain(batch: &mut Chained<'_>, chain: &Chain) {
    batch
        .request()
        .set_create()
        .op_newchain_do(&family())
        .encode()
        .push_table(TABLE)
        .push_name(&chain.name)
        .nested_hook()
        .push_num(chain.hook)
        .push_priority(chain.priority)
        .end_nested()
        .push_policy(chain.policy)
        .push_type(&chain.kind);
    for rule in &chain.rules {
        let mut request = batch.request().set_create().set_append().op_newrule_do(&family());
        let mut list = request.encode().push_table(TABLE).push_chain(&chain.name).nested_expressions();
        for expression in rule {
            list = encode(list, expression);
        }
    }
}

fn encode<P: Pusher>(list: PushExprListAttrs<P>, expression: &Expression) -> PushExprListAttrs<P> {
    const REGISTER: u32 = Registers::Reg1 as u32;
    let element = list.nested_elem();
    match expression {
        Expression::LoadMark | Expression::LoadInputName => {
            let key = if *expression == Expression::LoadMark { MetaKeys::Mark } else { MetaKeys::Iifname };
            element.nested_data_meta().push_dreg(REGISTER).push_key(key as u32).end_nested().end_nested()
        }
        Expression::LoadSourceAddress => element
            .nested_data_payload()
            .push_dreg(REGISTER)
            .push_base(PayloadBase::NetworkHeader as u32)
            .push_offset(SOURCE_ADDRESS.0)
            .push_len(SOURCE_ADDRESS.1)
            .end_nested()
            .end_nested(),
        Expression::Mask(mask) => element
            .nested_data_bitwise()
            .push_sreg(REGISTER)
            .push_dreg(REGISTER)
            .push_len(4)
            .nested_mask()
            .push_value(&mask.to_ne_bytes())
            .end_nested()
            .nested_xor()
            .push_value(&[0; 4])
            .end_nested()
            .end_nested()
            .end_nested(),
        Expression::Compare(comparison, value) => element
            .nested_data_cmp()
            .push_sreg(REGISTER)
            .push_op(comparison.kernel())
            .nested_data()
            .push_value(value)
            .end_nested()
            .end_nested()
            .end_nested(),
        Expression::SourceNat => element
            .nested_data_nat()
            .push_type(unsigned(libc::NFT_NAT_SNAT))
            .push_family(unsigned(libc::NFPROTO_IPV4))
            .push_reg_addr_min(REGISTER)
            .push_reg_addr_max(REGISTER)
            .push_flags(NatRangeFlags::MapIps as u32)
            .end_nested()
            .end_nested(),
        Expression::NoTrack => element.push_name(c"notrack").end_nested(),
        // Only read, never wanted: the kernel would refuse it by its name alone.
        Expression::Other(name) => element.push_name_bytes(name.as_bytes()).end_nested(),
    }
}

fn family() -> Nfgenmsg {
    let mut header = Nfgenmsg::new();
    header.nfgen_family = u8::try_from(libc::NFPROTO_IPV4).unwrap_or_default();
    header
}

fn bracket() -> Nfgenmsg {
    let mut header = Nfgenmsg::new();
    header.set_res_id(u16::try_from(libc::NFNL_SUBSYS_NFTABLES).unwrap_or_default());
    header
}

fn unsigned(constant: libc::c_int) -> u32 {
    constant.unsigned_abs()
}

fn broken(error: ErrorContext) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_equal_table_is_left_alone_and_any_difference_replaces_it() {
        let wanted = Table::wanted(24, None).unwrap();
        assert_eq!(plan(Some(&wanted), Some(&wanted)), None);
        assert_eq!(plan(None, None), None);
        assert_eq!(plan(None, Some(&wanted)), Some(Operation::Delete));
        let replace = Some(Operation::Replace(wanted.clone()));
        assert_eq!(plan(Some(&wanted), None), replace);
        let others = [
            Table { extra: true, ..wanted.clone() },
            Table::wanted(16, None).unwrap(),
            Table::wanted(24, Some("weave")).unwrap(),
        ];
        for other in others {
            assert_eq!(plan(Some(&wanted), Some(&other)), replace);
        }
    }

    #[test]
    fn a_name_that_no_interface_has_is_refused() {
        assert!(Table::wanted(24, Some("we\0ve")).is_err());
        assert!(Table::wanted(24, Some("a-name-of-sixteen")).is_err());
    }
}
