//go:build unix

package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"

	"github.com/tenurelib/tenure/internal/testkit"
)

// startNATS starts a server in this process until the test ends, and returns its URL, whose store
// is synced as far as tenure knows.
func startNATS(t *testing.T, change func(*server.Options)) string {
	t.Helper()
	const memory = "/dev/shm" // a slow disk would be most of what a test does
	where := ""
	if _, err := os.Stat(memory); err == nil {
		where = memory
	}
	dir, err := os.MkdirTemp(where, "tenure-nats")
	if err != nil {
		t.Fatal(err)
	}
	opts := &server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true}
	if change != nil {
		change(opts)
	}
	s, err := server.NewServer(opts)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
		eventually(t, soon, dir+" is removed", func() bool { return os.RemoveAll(dir) == nil }) // a server still removes what is left of batches
	})
	if !s.ReadyForConnections(soon) {
		t.Fatal("the server is not ready")
	}
	return fmt.Sprintf("nats://%s/?sync=always", strings.TrimPrefix(s.Addr().String(), "tcp://"))
}

func natsSite(t *testing.T) *site {
	t.Helper()
	return newSite(t, startNATS(t, nil))
}

func TestABadURLOfNATSOrEtcdIsRefusedAndNotQuoted(t *testing.T) {
	t.Setenv(storeEnv, "")
	for url, want := range map[string]string{
		"nats:/app:s3cret@h":                 "with // after it",
		"NATS://app:s3cret@h":                "with // after it",
		"etcd:/app:s3cret@h":                 "with // after it",
		"nats://app:s3/cret@h":               "%XX",
		"nats://app:s3cret@h1,app:s3cret@h2": "%XX",
		"nats://h/?table=b":                  `a parameter "table"; nats: URLs have stream,`,
		"nats://h/?stream=a.b":               "not one token",
		"nats://h/?creds=/missing":           "creds of the URL: open /missing: no such file",
		"etcd://app:s3/cret@h":               "%XX",
		"etcds://h/?ca=/missing":             "ca of the URL: open /missing: no such file",
	} {
		for _, command := range [][]string{{"status", "--key", "k"}, {"migrate"}, {"run", "--key", "k", "--", "true"}} {
			args := append([]string{command[0], "--store", url}, command[1:]...)
			status, stdout, stderr := tenureCommand(t, args...)
			if status != 2 || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, want) || strings.Contains(stderr, "s3cret") {
				t.Errorf("%q: exit status %d, %q and %q, want %q", args, status, stdout, stderr, want)
			}
		}
	}
}

func TestWhatNATSDoesNotHaveIsRefusedWithTheRemedy(t *testing.T) {
	t.Parallel()
	s := natsSite(t)
	s.ask(t, "migrate")
	for _, test := range []struct {
		args   []string
		remedy string
	}{
		{[]string{"list", "--sessions"}, "on Postgres or SQLite only"},
		{[]string{"owner", "--key", "tenant/acme"}, "on Postgres or SQLite only"},
		{[]string{"migrate", "--print"}, "run migrate once as a user who may set the store up"},
		{[]string{"list", "--table", "mine"}, "add ?stream=NAME to the URL"},
		{[]string{"list", "--schema", "mine"}, "needs a store on Postgres"},
	} {
		status, stdout, stderr := tenureCommand(t, append(test.args, "--store", s.store)...)
		if status != 2 || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, test.remedy) {
			t.Errorf("%q: exit status %d, %q and %q", test.args, status, stdout, stderr)
		}
	}
	for _, command := range [][]string{{"status", "--key", "k"}, {"list"}, {"resign", "--key", "k"}} {
		status, _, stderr := tenureCommand(t, append(command, "--store", s.store+"&stream=OTHER")...)
		if want := "tenure " + command[0] + `: there is no stream OTHER: run "tenure migrate"` + "\n"; status != 1 || stderr != want {
			t.Errorf("%q: exit status %d and %q", command, status, stderr)
		}
	}
}

func TestRunWaitsForANATSServerThatIsDown(t *testing.T) {
	t.Parallel()
	port, err := testkit.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	s := newSite(t, fmt.Sprint("nats://127.0.0.1:", port))
	impatient, patient := s.start(t, "a", s.service(t)...), s.start(t, "b", s.service(t)...)
	for _, r := range []*replica{impatient, patient} {
		r.awaitLog(t, "waiting for NATS")
	}
	impatient.signal(t, syscall.SIGTERM)
	if status := impatient.awaitExit(t); status != 0 {
		t.Errorf("a replica that was told to end while it waited: exit status %d", status)
	}
	startNATS(t, func(opts *server.Options) { opts.Port = port })
	s.awaitStart(t, 0)
	patient.awaitLog(t, "add sync=always to the parameters of the store's URL")
}

func TestRunWaitsForAClusterOfNATSWithoutAMajority(t *testing.T) {
	t.Parallel()
	var ports [2]int
	var routes []*url.URL
	for i := range ports {
		port, err := testkit.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		ports[i], routes = port, append(routes, &url.URL{Scheme: "nats", Host: fmt.Sprint("127.0.0.1:", port)})
	}
	start := func(i int) string {
		return startNATS(t, func(opts *server.Options) {
			opts.ServerName, opts.Routes = fmt.Sprint("s", i), routes
			opts.Cluster = server.ClusterOpts{Name: "c", Host: "127.0.0.1", Port: ports[i]}
		})
	}
	s := newSite(t, start(0))
	r := s.start(t, "a", s.service(t)...)
	r.awaitLog(t, "waiting for NATS")
	start(1)
	s.awaitStart(t, 0)
}

func TestTLSAndCredentialsOfNATSComeFromFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	authority := newCertificate(t, nil)
	pair := newCertificate(t, authority)
	ca, cert, key := authority.files(t, dir, "ca"), pair.files(t, dir, "pair"), filepath.Join(dir, "pair.key")
	user, _ := nkeys.CreateUser()
	seed, _ := user.Seed()
	public, _ := user.PublicKey()
	nkey := filepath.Join(dir, "nkey")
	if err := os.WriteFile(nkey, seed, 0o600); err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(authority.leaf)
	url := startNATS(t, func(opts *server.Options) {
		opts.TLSConfig = &tls.Config{
			Certificates: []tls.Certificate{{Certificate: [][]byte{pair.der}, PrivateKey: pair.key}},
			ClientCAs:    pool, ClientAuth: tls.RequireAndVerifyClientCert,
		}
		opts.TLSTimeout = soon.Seconds()
		opts.Users = []*server.User{
			{Username: "app", Password: "s3cret"},
			{Username: "guest", Password: "s3cret", Permissions: &server.Permissions{
				Publish: &server.SubjectPermission{Deny: []string{"$JS.API.STREAM.>"}},
			}},
		}
		opts.Nkeys = []*server.NkeyUser{{Nkey: public}}
	})
	creds, operated := withOperator(t, dir)
	secure := "&ca=" + ca + "&cert=" + cert + "&key=" + key
	as := func(user string) string { return strings.Replace(url, "//", "//"+user+"@", 1) }
	for _, test := range []struct{ name, store, want string }{ // empty: it works
		{"a password", as("app:s3cret") + secure, ""},
		{"an nkey", url + secure + "&nkey=" + nkey, ""},
		{"a file of credentials", operated + "&creds=" + creds, ""},
		{"no credentials", url + secure, "uthorization"},
		{"no file of credentials", operated, "uthorization"},
		{"a wrong password", as("app:s3cret2") + secure, "uthorization"},
		{"a token that is not known", as("s3cret2") + secure, "uthorization"},
		{"no permission", as("guest:s3cret") + secure, `Permissions Violation for Publish to "$JS.API.STREAM.`},
		{"an unknown authority", as("app:s3cret") + "&cert=" + cert + "&key=" + key, "certificate"},
		{"no certificate", as("app:s3cret") + "&ca=" + ca, "tls"},
		{"a server without TLS", operated + "&creds=" + creds + "&tls=required", "secure connection not available"},
		{"a server without TLS, again", strings.Replace(operated, "nats:", "tls:", 1) + "&creds=" + creds, "secure connection not available"},
	} {
		t.Run(test.name, func(t *testing.T) {
			args := []string{"migrate", "--store", test.store}
			if strings.Contains(test.want, "uthorization") { // run does not wait for a server that refuses it
				args = []string{"run", "--store", test.store, "--key", "k", "--", "true"}
			}
			status, stdout, stderr := tenureCommand(t, args...)
			if test.want == "" {
				if status != 0 || stderr != "" {
					t.Errorf("exit status %d, %q and %q", status, stdout, stderr)
				}
				return
			}
			if status != 1 || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, test.want) || strings.Contains(stdout+stderr, "s3cret") {
				t.Errorf("exit status %d, %q and %q; want %q", status, stdout, stderr, test.want)
			}
		})
	}
}

// withOperator starts a server whose users have credentials, and returns the file of those of one
// user, and the server's URL.
func withOperator(t *testing.T, dir string) (creds, url string) {
	t.Helper()
	keys := func(kp nkeys.KeyPair, err error) (nkeys.KeyPair, string) {
		return kp, testkit.Must(testkit.Must(kp, err).PublicKey())
	}
	operator, operatorID := keys(nkeys.CreateOperator())
	resolver := &server.MemAccResolver{}
	account := func(limits jwt.JetStreamLimits) (nkeys.KeyPair, string) {
		kp, id := keys(nkeys.CreateAccount())
		claims := jwt.NewAccountClaims(id)
		claims.Limits.JetStreamLimits = limits
		if err := resolver.Store(id, testkit.Must(claims.Encode(operator))); err != nil {
			t.Fatal(err)
		}
		return kp, id
	}
	_, system := account(jwt.JetStreamLimits{})
	app, _ := account(jwt.JetStreamLimits{DiskStorage: -1, MemoryStorage: -1, Streams: -1, Consumer: -1})
	user, userID := keys(nkeys.CreateUser())
	file := testkit.Must(jwt.FormatUserConfig(testkit.Must(jwt.NewUserClaims(userID).Encode(app)), testkit.Must(user.Seed())))
	creds = filepath.Join(dir, "creds")
	if err := os.WriteFile(creds, file, 0o600); err != nil {
		t.Fatal(err)
	}
	claims := testkit.Must(jwt.DecodeOperatorClaims(testkit.Must(jwt.NewOperatorClaims(operatorID).Encode(operator))))
	return creds, startNATS(t, func(opts *server.Options) {
		opts.TrustedOperators, opts.AccountResolver, opts.SystemAccount = []*jwt.OperatorClaims{claims}, resolver, system
	})
}

// certificate is one for 127.0.0.1, and its key.
type certificate struct {
	leaf *x509.Certificate
	der  []byte
	key  *ecdsa.PrivateKey
}

// newCertificate returns one that the authority has signed, or an authority.
func newCertificate(t *testing.T, by *certificate) *certificate {
	t.Helper()
	c := &certificate{key: testkit.Must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, BasicConstraintsValid: true, IsCA: by == nil,
	}
	parent, key := template, c.key
	if by != nil {
		parent, key = by.leaf, by.key
	}
	c.der = testkit.Must(x509.CreateCertificate(rand.Reader, template, parent, &c.key.PublicKey, key))
	c.leaf = testkit.Must(x509.ParseCertificate(c.der))
	return c
}

// files writes NAME.pem and NAME.key, and returns the path of the first.
func (c *certificate) files(t *testing.T, dir, name string) string {
	t.Helper()
	for file, block := range map[string]*pem.Block{
		".pem": {Type: "CERTIFICATE", Bytes: c.der},
		".key": {Type: "EC PRIVATE KEY", Bytes: testkit.Must(x509.MarshalECPrivateKey(c.key))},
	} {
		if err := os.WriteFile(filepath.Join(dir, name+file), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return filepath.Join(dir, name+".pem")
}
