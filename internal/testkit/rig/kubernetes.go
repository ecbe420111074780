package rig

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
)

// ErrNotBuilt means that there is no program of the Kubernetes API server: "make kube-apiserver"
// builds it, for some ten minutes.
var ErrNotBuilt = errors.New("there is no kube-apiserver: run make kube-apiserver")

// KubeProgram returns the path of the Kubernetes API server's program: $TENURE_KUBE_APISERVER, or where
// "make kube-apiserver" puts what it builds.
func KubeProgram(ctx context.Context) (string, error) {
	path := os.Getenv("TENURE_KUBE_APISERVER")
	if path == "" {
		root, err := command(ctx, "list", "-m", "-f", "{{.Dir}}", "github.com/tenurelib/tenure")
		if err != nil {
			return "", err
		}
		module, err := os.ReadFile(filepath.Join(root, "proof", "kubernetes", "go.mod"))
		if err != nil {
			return "", err
		}
		version := kubeVersion.FindSubmatch(module)
		if version == nil {
			return "", errors.New("the module of the API server does not say which version it has")
		}
		cache := cmp.Or(os.Getenv("XDG_CACHE_HOME"), filepath.Join(os.Getenv("HOME"), ".cache"))
		path = filepath.Join(cache, "tenure", "kube-apiserver-"+string(version[1]))
	}
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("%w (%s)", ErrNotBuilt, path)
	}
	return path, nil
}

var kubeVersion = regexp.MustCompile(`k8s\.io/kubernetes (v[0-9.]+)`)

// Kube is an API server of Kubernetes on an etcd server.
type Kube struct {
	Server
	Client *http.Client // as a user who may do everything
}

// KubeTokens are the bearer tokens of an API server's users: name, groups.
type KubeTokens map[string][2]string

// KubeAdmin is the token of a user who may do everything.
const KubeAdmin = "admin-token"

// NewKube returns an API server that is not started yet, with further arguments for its program. Servers on
// the same etcd need the same directory for their keys, and each its own for its certificate and log.
func NewKube(ctx context.Context, etcd *url.URL, keys, dir string, tokens KubeTokens, args ...string) (*Kube, error) {
	program, err := KubeProgram(ctx)
	if err != nil {
		return nil, err
	}
	host, err := address()
	if err != nil {
		return nil, err
	}
	private, public := filepath.Join(keys, "sa.key"), filepath.Join(keys, "sa.pub")
	if _, err := os.Stat(private); errors.Is(err, fs.ErrNotExist) {
		if err := writeKeys(private, public); err != nil {
			return nil, err
		}
	}
	text := KubeAdmin + ",admin,admin,system:masters\n"
	for token, of := range tokens {
		text += fmt.Sprintf("%s,%s,%s,%q\n", token, of[0], of[0], of[1])
	}
	users := filepath.Join(dir, "tokens.csv")
	if err := os.WriteFile(users, []byte(text), 0o600); err != nil {
		return nil, err
	}
	k := &Kube{Client: KubeClient(KubeAdmin)}
	k.URL = &url.URL{Scheme: "https", Host: host}
	k.Log = filepath.Join(dir, "kube-apiserver.log")
	k.Answers = healthy(k.Client, k.URL.String()+"/readyz")
	k.Command = func() *exec.Cmd {
		return exec.Command(program, append([]string{
			"--etcd-servers=" + etcd.String(), "--cert-dir=" + filepath.Join(dir, "certificates"), "--bind-address=127.0.0.1",
			"--secure-port=" + k.URL.Port(), "--service-cluster-ip-range=10.0.0.0/24", "--authorization-mode=RBAC", "--token-auth-file=" + users,
			"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + public,
			"--service-account-signing-key-file=" + private, "--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none",
		}, args...)...)
	}
	return k, nil
}

// KubeClient returns a client with a bearer token that trusts any certificate, as the servers make
// their own.
func KubeClient(token string) *http.Client {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
	return &http.Client{Transport: bearer{token, transport}}
}

type bearer struct {
	token string
	*http.Transport
}

func (b bearer) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Header.Set("Authorization", "Bearer "+b.token)
	return b.Transport.RoundTrip(req)
}

func writeKeys(private, public string) error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	of, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return err
	}
	secret := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
	if err := os.WriteFile(private, secret, 0o600); err != nil {
		return err
	}
	return os.WriteFile(public, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: of}), 0o600)
}
