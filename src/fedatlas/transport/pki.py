"""Keys, certificates and requests for them: what the engines' deployments make of a public-key infrastructure.

Keys and certificates are objects of the package cryptography, which is imported when it is needed.
"""

import contextlib
import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedatlas.core.errors import FederationError

EARLIER = datetime.timedelta(days=1)
"""How long before it is made a certificate is valid: a site's clock may be behind, and no connection would be had."""


def write(path: Path, data: bytes, secret: bool = False) -> None:
    """Writes a file whole or not at all; what is secret, for this user alone from its first byte on."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        part.unlink()
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
        file.write(data)
    os.replace(part, path)


# ----------------------------------------------------------------------------------------------------------------- keys


def ec_key() -> Any:
    """A new ECDSA key on P-384."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def rsa_key() -> Any:
    """A new RSA key of 2048 bits."""
    from cryptography.hazmat.primitives.asymmetric import rsa

    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def private_pem(key: Any, form: str = "PKCS8") -> bytes:
    """A private key in PEM, not encrypted. form: "PKCS8", "TraditionalOpenSSL" or "OpenSSH"."""
    from cryptography.hazmat.primitives import serialization as to

    return key.private_bytes(to.Encoding.PEM, getattr(to.PrivateFormat, form), to.NoEncryption())


def public_openssh(key: Any) -> bytes:
    """The public half of a private key, as a line in OpenSSH's format."""
    from cryptography.hazmat.primitives import serialization as to

    return key.public_key().public_bytes(to.Encoding.OpenSSH, to.PublicFormat.OpenSSH) + b"\n"


def key_of(path: Path) -> Any:
    """The private key in a PEM file. Raises FederationError where it holds none."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise FederationError(f"{path}: no private key can be read there ({type(error).__name__})") from None


def private_openssh_of(path: Path) -> Any:
    """The ECDSA private key in a file in OpenSSH's format. Raises FederationError where it holds none."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise FederationError(
            f"{path} is no private key in OpenSSH's format ({type(error).__name__})"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FederationError(f"{path} holds a key of another kind than ECDSA: make one with `renew`")
    return key


def public_openssh_of(path: Path) -> Any:
    """The ECDSA public key in a file in OpenSSH's format. Raises FederationError where it holds none."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FederationError(
            f"{path} is no public key in OpenSSH's format ({type(error).__name__})"
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise FederationError(f"{path} holds a key of another kind than ECDSA")
    return key


# --------------------------------------------------------------------------------------------------------- certificates


def certificate_of(path: Path) -> Any:
    """The certificate in a PEM file. Raises FederationError where it holds none."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        raise FederationError(f"{path}: not a certificate in PEM") from None


def pem(certificate: Any) -> bytes:
    """A certificate, or a request for one, in PEM."""
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def named(name: str) -> Any:
    """The subject of a certificate with a common name, of which 64 characters are kept."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def name_of(subject: Any) -> str:
    """The common name in the subject of a certificate."""
    from cryptography.x509.oid import NameOID

    return str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def request(subject: Any, key: Any, algorithm: str) -> bytes:
    """A request for a certificate for `key`, in PEM. algorithm: of the signature's digest, as "SHA384"."""
    from cryptography import x509

    return pem(x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, _digest(algorithm)))


def issue(
    subject: Any,
    public: Any,
    issuer: Any,
    signer: Any,
    end: datetime.datetime,
    extensions: Sequence[tuple[Any, bool]],
    algorithm: str,
    *,
    begin: datetime.datetime | None = None,
    number: int | None = None,
) -> Any:
    """A certificate for a public key, valid from `EARLIER` than `begin` (now, unless given) until `end`.

    issuer: the subject of the authority's certificate; signer: the authority's key. extensions: each with whether it is
    critical. algorithm: of the signature's digest, as "SHA384". number: its serial number; a random one unless given.
    """
    from cryptography import x509

    begin = begin or min(datetime.datetime.now(datetime.UTC), end)
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(number or x509.random_serial_number())
        .not_valid_before(begin - EARLIER)
        .not_valid_after(end)
    )
    for extension, critical in extensions:
        built = built.add_extension(extension, critical=critical)
    return built.sign(signer, _digest(algorithm))


def in_days(days: float) -> datetime.datetime:
    """The moment so many days from now; negative: in the past."""
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)


def identifies(public: Any, signer: Any) -> list[tuple[Any, bool]]:
    """The extensions that name the key of a certificate, and the authority's key that signs it."""
    from cryptography import x509

    return [
        (x509.SubjectKeyIdentifier.from_public_key(public), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False),
    ]


def uses(*, authority: bool) -> list[tuple[Any, bool]]:
    """The extensions that say what a key is for: to sign certificates, or to identify a party."""
    from cryptography import x509

    others = (
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "encipher_only",
        "decipher_only",
    )
    usage = x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        **dict.fromkeys(others, False),
    )
    basic = x509.BasicConstraints(ca=authority, path_length=0 if authority else None)
    return [(basic, True), (usage, True)]


def serves(hosts: Sequence[str]) -> list[tuple[Any, bool]]:
    """The extensions of a server's certificate: the names and addresses under which it is reached."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    names = x509.SubjectAlternativeName([_general_name(host) for host in dict.fromkeys(hosts)])
    return [(names, False), (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)]


def _general_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _digest(name: str) -> Any:
    from cryptography.hazmat.primitives import hashes

    return getattr(hashes, name)()
