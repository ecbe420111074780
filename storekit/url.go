package storekit

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/tenurelib/tenure"
)

// URL is the URL of a store on several hosts, such as
//
//	nats://user:password@host-a:4222,host-b:4222/path?name=value
type URL struct {
	Scheme     string
	User       *url.Userinfo // nil: none
	Hosts      []string
	Path       string // without the slashes around it
	Parameters map[string]string
}

var hostAndPort = regexp.MustCompile(`^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?$`)

// ParseURL parses a URL that has one of the schemes, and no parameters but the given ones. Its
// errors are [tenure.ErrInvalid], and quote nothing that could be part of a password.
func ParseURL(text string, schemes, parameters []string) (URL, error) {
	u := URL{Parameters: make(map[string]string)}
	invalid := func(format string, args ...any) (URL, error) {
		return URL{}, fmt.Errorf("%w: the URL %s", tenure.ErrInvalid, fmt.Sprintf(format, args...))
	}
	scheme, rest, ok := strings.Cut(text, "://")
	if !ok || !slices.Contains(schemes, scheme) {
		return invalid("does not begin with %s://", strings.Join(schemes, ":// or "))
	}
	u.Scheme = scheme
	rest, query, _ := strings.Cut(rest, "?")
	if strings.Contains(query, "@") {
		return invalid("has an @ after the host: write special characters in user and password as %%XX")
	}
	if i := strings.LastIndex(rest, "@"); i >= 0 {
		parsed, err := url.Parse(scheme + "://" + rest[:i] + "@host")
		if err != nil || parsed.Host != "host" || strings.ContainsAny(rest[:i], "@/") {
			return invalid("cannot be parsed: write special characters in user and password as %%XX")
		}
		u.User, rest = parsed.User, rest[i+1:]
	}
	hosts, path, _ := strings.Cut(rest, "/")
	u.Hosts = strings.Split(hosts, ",")
	if slices.ContainsFunc(u.Hosts, func(host string) bool { return !hostAndPort.MatchString(host) }) {
		return invalid("cannot be parsed: after %s:// comes user:password@host:port, with special characters in user and password as %%XX and other hosts after a comma", scheme)
	}
	path, err := url.PathUnescape(path)
	if err != nil || strings.Contains(path, "#") {
		return invalid("has a path that cannot be parsed: write special characters as %%XX")
	}
	u.Path = strings.Trim(path, "/")
	values, err := url.ParseQuery(query)
	if err != nil {
		return invalid("has parameters that cannot be parsed: write special characters as %%XX")
	}
	for name, values := range values {
		switch {
		case !slices.Contains(parameters, name):
			return invalid("has a parameter %q; %s: URLs have %s", name, scheme, strings.Join(parameters, ", "))
		case len(values) > 1:
			return invalid("has %s twice", name)
		case values[0] == "":
			return invalid("has no value for %q", name)
		}
		u.Parameters[name] = values[0]
	}
	return u, nil
}

// TLS returns a config from the PEM files that the parameters ca, cert and key name. ca has the
// authority that signed the servers' certificates, if the system does not know it; cert and key
// have the certificate and key of this client, which are read again for each connection. TLS
// returns nil if there are no such parameters, and [tenure.ErrInvalid] if a file is unsuitable.
func (u URL) TLS() (*tls.Config, error) {
	ca, cert, key := u.Parameters["ca"], u.Parameters["cert"], u.Parameters["key"]
	if ca == "" && cert == "" && key == "" {
		return nil, nil
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if ca != "" {
		text, err := os.ReadFile(ca)
		if err != nil {
			return nil, fmt.Errorf("%w: ca of the URL: %w", tenure.ErrInvalid, err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("%w: ca of the URL: %s has no certificate", tenure.ErrInvalid, ca)
		}
	}
	if (cert == "") != (key == "") {
		return nil, fmt.Errorf("%w: cert of the URL needs key, and key needs cert", tenure.ErrInvalid)
	}
	if cert != "" {
		if _, err := tls.LoadX509KeyPair(cert, key); err != nil {
			return nil, fmt.Errorf("%w: cert and key of the URL: %w", tenure.ErrInvalid, err)
		}
		for _, file := range []*string{&cert, &key} { // the working directory may change
			if path, err := filepath.Abs(*file); err == nil {
				*file = path
			}
		}
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(cert, key)
			return &pair, err
		}
	}
	return cfg, nil
}
