//! Who the API server is, and who its users are: certificates, keys, tokens, kubeconfigs.

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use std::fmt::Write as _;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};

/// A user that the API server knows without a ServiceAccount, as in a cluster that kubeadm made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// May do all.
    Admin,
    /// kube-controller-manager.
    ControllerManager,
    /// kube-proxy.
    KubeProxy,
    /// The kubelet of a node.
    Node(String),
}

impl Identity {
    fn user(&self) -> String {
        match self {
            Self::Admin => "admin".to_owned(),
            Self::ControllerManager => "system:kube-controller-manager".to_owned(),
            Self::KubeProxy => "system:kube-proxy".to_owned(),
            Self::Node(name) => format!("system:node:{name}"),
        }
    }

    fn groups(&self) -> &'static str {
        match self {
            Self::Admin => "system:masters",
            Self::ControllerManager | Self::KubeProxy => "",
            Self::Node(_) => "system:nodes",
        }
    }

    /// No secret: the API server listens in the testbed's namespaces alone.
    fn token(&self) -> String {
        format!("token-of-{}", self.user().replace(':', "-"))
    }

    fn file_name(&self) -> String {
        format!("{}.kubeconfig", self.user().replace(':', "-"))
    }
}

/// What a ServiceAccount's token ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound<'a> {
    /// Its time alone.
    No,
    /// The Pod of that name, in the ServiceAccount's namespace; the token also names the Pod's node.
    Pod(&'a str),
    /// The Node of that name.
    Node(&'a str),
}

/// The files of one API server.
#[derive(Debug)]
pub(super) struct Credentials {
    directory: PathBuf,
    server: String,
}

impl Credentials {
    /// Makes them all, for a server of that address and for users on those nodes.
    pub(super) fn make(directory: &Path, address: Ipv4Addr, port: u16, nodes: &[&str]) -> Result<Self> {
        let this = Self { directory: directory.to_owned(), server: format!("https://{address}:{port}") };
        this.make_certificates(address)?;
        let key = KeyPair::generate()?;
        fs::write(this.service_account_key(), key.serialize_pem())?;
        fs::write(this.service_account_public_key(), key.public_key_pem())?;
        this.make_users(nodes)?;
        Ok(this)
    }

    fn make_certificates(&self, address: Ipv4Addr) -> Result<()> {
        let key = KeyPair::generate()?;
        let mut authority = CertificateParams::default();
        authority.distinguished_name.push(DnType::CommonName, "reweave-lb testbed");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        fs::write(self.authority(), authority.self_signed(&key)?.pem())?;
        let authority = Issuer::new(authority, key);

        let names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"];
        let mut server = CertificateParams::new(names.map(str::to_owned))?;
        for address in [address, Ipv4Addr::LOCALHOST] {
            server.subject_alt_names.push(SanType::IpAddress(IpAddr::V4(address)));
        }
        server.distinguished_name.push(DnType::CommonName, "kube-apiserver");
        server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate()?;
        fs::write(self.server_certificate(), server.signed_by(&key, &authority)?.pem())?;
        fs::write(self.server_key(), key.serialize_pem())?;
        Ok(())
    }

    /// The users' tokens in the form that the server reads: token,user,uid,"groups".
    fn make_users(&self, nodes: &[&str]) -> Result<()> {
        let mut tokens = String::new();
        let nodes = nodes.iter().map(|name| Identity::Node((*name).to_owned()));
        for user in
            [Identity::Admin, Identity::ControllerManager, Identity::KubeProxy].into_iter().chain(nodes)
        {
            let (token, name) = (user.token(), user.user());
            // Writing to a String cannot fail.
            let _ = writeln!(tokens, "{token},{name},{name},\"{}\"", user.groups());
            self.write_kubeconfig(&self.kubeconfig(&user), &format!("token: {token}"))?;
        }
        fs::write(self.tokens(), tokens)?;
        Ok(())
    }

    /// A kubeconfig for the user of a token that a file holds; a client reads it again when it is renewed.
    pub(super) fn kubeconfig_for_token_file(&self, name: &str, token: &Path) -> Result<PathBuf> {
        let path = self.directory.join(format!("{name}.kubeconfig"));
        self.write_kubeconfig(&path, &format!("tokenFile: {}", token.display()))?;
        Ok(path)
    }

    fn write_kubeconfig(&self, path: &Path, user: &str) -> Result<()> {
        let (server, authority) = (&self.server, self.authority());
        let text = format!(
            "apiVersion: v1
kind: Config
clusters:
- name: testbed
  cluster:
    server: {server}
    certificate-authority: {}
users:
- name: user
  user:
    {user}
contexts:
- name: testbed
  context:
    cluster: testbed
    user: user
current-context: testbed
",
            authority.display()
        );
        Ok(fs::write(path, text)?)
    }

    pub(super) fn server(&self) -> &str {
        &self.server
    }

    pub(super) fn kubeconfig(&self, user: &Identity) -> PathBuf {
        self.directory.join(user.file_name())
    }

    pub(super) fn authority(&self) -> PathBuf {
        self.directory.join("ca.crt")
    }

    pub(super) fn server_certificate(&self) -> PathBuf {
        self.directory.join("server.crt")
    }

    pub(super) fn server_key(&self) -> PathBuf {
        self.directory.join("server.key")
    }

    /// Signs the tokens of ServiceAccounts.
    pub(super) fn service_account_key(&self) -> PathBuf {
        self.directory.join("service-account.key")
    }

    /// Checks them. The API server takes an ECDSA key from a file of its own, not out of the private one.
    pub(super) fn service_account_public_key(&self) -> PathBuf {
        self.directory.join("service-account.pub")
    }

    pub(super) fn tokens(&self) -> PathBuf {
        self.directory.join("tokens.csv")
    }
}
