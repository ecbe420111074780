//go:build unix

package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
	"github.com/tenurelib/tenure/stores/kubetenure"
)

// openKube opens the store of a URL kube://NAMESPACE. The parameter server is the URL of an API server
// that needs no credentials, such as that of kubectl proxy. Without it, the API server is that of
// the pod, or else of the kubeconfig's current context. The parameter lease, as TYPE/ID=NAME, names
// the Lease of a key, such as one that candidates of client-go use.
func openKube(ctx context.Context, text string, _ *storeFlag, log *slog.Logger) (database, error) {
	u, err := storekit.ParseURL(text, []string{"kube"}, []string{"server", "lease"})
	if err != nil {
		return nil, err
	}
	if u.User != nil || len(u.Hosts) > 1 || strings.Contains(u.Hosts[0], ":") || u.Path != "" {
		return nil, fmt.Errorf("%w: the URL must have a namespace and nothing else after the //", tenure.ErrInvalid)
	}
	cfg := kubetenure.Config{Namespace: u.Hosts[0], URL: u.Parameters["server"], Logger: log}
	if text := u.Parameters["lease"]; text != "" {
		var key tenure.Key
		i := strings.LastIndex(text, "=") // the name of a Lease has none
		if i < 0 || key.UnmarshalText([]byte(text[:i])) != nil {
			return nil, fmt.Errorf("%w: lease of the URL must be TYPE/ID=NAME, with the name of the Lease that the key uses", tenure.ErrInvalid)
		}
		cfg.Leases = map[tenure.Key]string{key: text[i+1:]}
	}
	if cfg.URL == "" && os.Getenv("KUBERNETES_SERVICE_HOST") == "" {
		if cfg.URL, cfg.Client, err = currentContext(); err != nil {
			return nil, err
		}
	}
	return whenAnswered(ctx, "Kubernetes", log, func(context.Context) (database, error) { return kubetenure.New(cfg) })
}

// kubeconfig is what tenure reads of a kubeconfig.
type kubeconfig struct {
	CurrentContext string `yaml:"current-context"`
	Contexts       []struct {
		Name    string
		Context struct{ Cluster, User string }
	}
	Clusters []struct {
		Name    string
		Cluster struct {
			Server   string
			CA       string `yaml:"certificate-authority"`
			CAData   string `yaml:"certificate-authority-data"`
			Name     string `yaml:"tls-server-name"`
			Insecure bool   `yaml:"insecure-skip-tls-verify"`
			Proxy    string `yaml:"proxy-url"`
		}
	}
	Users []struct {
		Name string
		User struct {
			Token     string
			TokenFile string `yaml:"tokenFile"`
			Cert      string `yaml:"client-certificate"`
			CertData  string `yaml:"client-certificate-data"`
			Key       string `yaml:"client-key"`
			KeyData   string `yaml:"client-key-data"`
		}
	}
}

// currentContext returns the API server of the kubeconfig's current context, and a client with the
// context's token or certificate.
func currentContext() (server string, _ *http.Client, err error) {
	path := os.Getenv("KUBECONFIG")
	if path == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", nil, err
		}
		path = filepath.Join(home, ".kube", "config")
	}
	invalid := func(format string, args ...any) (string, *http.Client, error) {
		return "", nil, fmt.Errorf("%w: this is not a pod, and the kubeconfig %s %s; kubectl proxy works for every context: add ?server=http://127.0.0.1:8001 to the URL",
			tenure.ErrInvalid, path, fmt.Sprintf(format, args...))
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return invalid("cannot be read (%v)", err)
	}
	var all kubeconfig
	if yaml.Unmarshal(text, &all) != nil { // the error could quote a token
		return invalid("is not YAML of that form")
	}
	file := func(name string) string { // relative to the kubeconfig
		if name == "" || filepath.IsAbs(name) {
			return name
		}
		return filepath.Join(filepath.Dir(path), name)
	}
	for _, context := range all.Contexts {
		for _, cluster := range all.Clusters {
			if context.Name != all.CurrentContext || cluster.Name != context.Context.Cluster {
				continue
			}
			cluster := cluster.Cluster
			if cluster.Proxy != "" {
				return invalid("has a proxy-url")
			}
			secure := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: cluster.Name, InsecureSkipVerify: cluster.Insecure}
			if cluster.CA != "" || cluster.CAData != "" {
				authority, err := pemOf(file(cluster.CA), cluster.CAData)
				secure.RootCAs = x509.NewCertPool()
				if err != nil || !secure.RootCAs.AppendCertsFromPEM(authority) {
					return invalid("has a certificate-authority that cannot be read")
				}
			}
			transport := http.DefaultTransport.(*http.Transport).Clone()
			transport.TLSClientConfig = secure
			transport.HTTP2 = &http.HTTP2Config{SendPingTimeout: 5 * time.Second, PingTimeout: 3 * time.Second}
			for _, user := range all.Users {
				if user.Name != context.Context.User {
					continue
				}
				user := user.User
				switch {
				case user.Token != "" || user.TokenFile != "":
					return cluster.Server, &http.Client{Transport: bearer{transport, user.Token, file(user.TokenFile)}}, nil
				case user.Cert != "" || user.CertData != "":
					cert, err := pemOf(file(user.Cert), user.CertData)
					key, keyErr := pemOf(file(user.Key), user.KeyData)
					pair, pairErr := tls.X509KeyPair(cert, key)
					if err := cmp.Or(err, keyErr, pairErr); err != nil {
						return invalid("has a client certificate that cannot be read")
					}
					secure.Certificates = []tls.Certificate{pair}
					return cluster.Server, &http.Client{Transport: transport}, nil
				}
			}
		}
	}
	return invalid("has no current context whose user has a token or a certificate")
}

// pemOf returns the content of a file, or what is in the kubeconfig in its place.
func pemOf(file, data string) ([]byte, error) {
	if data != "" {
		return base64.StdEncoding.DecodeString(data)
	}
	return os.ReadFile(file)
}

// bearer sends a token, or what a file has, with each request.
type bearer struct {
	to    *http.Transport
	token string
	file  string
}

func (b bearer) RoundTrip(req *http.Request) (*http.Response, error) {
	token := b.token
	if b.file != "" {
		text, err := os.ReadFile(b.file)
		if err != nil {
			return nil, err
		}
		token = strings.TrimSpace(string(text))
	}
	req = req.Clone(req.Context())
	req.Header.Set("Authorization", "Bearer "+token)
	return b.to.RoundTrip(req)
}

func (b bearer) CloseIdleConnections() { b.to.CloseIdleConnections() }
