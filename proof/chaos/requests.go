package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	crand "crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tenurelib/tenure/internal/testkit/rig"
)

const (
	requestClients = 32
	answered       = "answered" // or refused, or unknown
)

// request is one request of a client, and what became of it.
type request struct {
	id, tenant string
	idempotent bool
	entry      string // the replica that got it
	from, to   time.Duration
	outcome    string
	said       string // the answer
	token      int64
	number     int // 0: the handler does not know whether it was counted
}

// doors are how replicas are reached: each by clients directly, and by the other replicas through a proxy.
type doors struct {
	schemes     []string // by replica
	certificate string
	trusted     *x509.CertPool

	mu    sync.Mutex
	addrs map[string]string // by replica, where clients reach those that serve
	peers map[string]*rig.Proxy
	asked []request
}

func newDoors(dir string) (*doors, error) {
	d := &doors{schemes: []string{"http", "h2c", "https", "http", "h2c"}, certificate: filepath.Join(dir, "tls.pem"),
		trusted: x509.NewCertPool(), addrs: map[string]string{}, peers: map[string]*rig.Proxy{}}
	key, err := ecdsa.GenerateKey(elliptic.P256(), crand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour)}
	der, err := x509.CreateCertificate(crand.Reader, template, template, &key.PublicKey, key)
	secret, err2 := x509.MarshalPKCS8PrivateKey(key)
	if err := errors.Join(err, err2); err != nil {
		return nil, err
	}
	certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	d.trusted.AppendCertsFromPEM(certificate)
	return d, errors.Join(os.WriteFile(d.certificate, certificate, 0o644),
		os.WriteFile(d.certificate+".key", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}), 0o600))
}

// configure gives a replica its address.
func (d *doors) configure(i int, cfg replicaConfig) (replicaConfig, error) {
	proxy, err := rig.NewProxy("127.0.0.1:1", nil)
	if err != nil {
		return cfg, err
	}
	proxy.Shut()
	d.peers[cfg.Name] = proxy
	cfg.Address, cfg.Certificate, cfg.Key = d.schemes[i]+"://"+proxy.Addr(), d.certificate, d.certificate+".key"
	return cfg, nil
}

// heard opens and shuts the doors of a replica as it says.
func (d *doors) heard(e event) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch e.Kind {
	case serves:
		d.addrs[e.Replica] = e.Note
		d.peers[e.Replica].Redirect(e.Note)
		for d.peers[e.Replica].Open() != nil { // another process may have the port for a moment
			time.Sleep(10 * time.Millisecond)
		}
	case leaves, killed:
		delete(d.addrs, e.Replica)
		d.peers[e.Replica].Shut()
	}
}

// door returns any replica that serves, and where.
func (d *doors) door() (name, url string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for name, addr := range d.addrs { // in random order
		return name, d.schemes[name[len(name)-1]-'0'] + "://" + addr
	}
	return "", ""
}

// ask has clients send requests until the returned func is called.
func (d *doors) ask() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var clients sync.WaitGroup
	plain := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: d.trusted}, ForceAttemptHTTP2: true, MaxIdleConnsPerHost: requestClients}
	h2c := plain.Clone()
	h2c.Protocols = new(http.Protocols)
	h2c.Protocols.SetUnencryptedHTTP2(true)
	for c := range requestClients {
		clients.Go(func() {
			for n := 0; pause(ctx, rand.N(100*time.Millisecond)); n++ {
				entry, url := d.door()
				if entry == "" {
					continue
				}
				req := request{id: fmt.Sprint(c, ".", n), tenant: tenant(rand.N(tenants)), idempotent: rand.N(5) == 0, entry: entry}
				by := plain
				if rest, ok := strings.CutPrefix(url, "h2c:"); ok {
					by, url = h2c, "http:"+rest
				}
				req.send(by, url)
				d.mu.Lock()
				d.asked = append(d.asked, req)
				d.mu.Unlock()
			}
		})
	}
	return func() {
		cancel()
		clients.Wait()
		plain.CloseIdleConnections()
		h2c.CloseIdleConnections()
	}
}

func (d *doors) close() {
	for _, proxy := range d.peers {
		proxy.Close()
	}
}

// send sends the request and notes what became of it. A client knows of an answer that breaks off only that it may have run.
func (q *request) send(by *http.Transport, url string) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/"+q.tenant, strings.NewReader("body"))
	if err != nil {
		panic(err)
	}
	r.GetBody = nil // or the transport would repeat some by itself
	r.Header.Set("Id", q.id)
	if q.idempotent {
		r.Header.Set("Idempotency-Key", q.id)
	}
	q.from = monotonic()
	answer, err := by.RoundTrip(r)
	var body []byte
	if err == nil {
		body, err = io.ReadAll(answer.Body)
		answer.Body.Close()
	}
	q.to = monotonic()
	if err != nil {
		q.outcome, q.said = unknown, err.Error()
		if op := (*net.OpError)(nil); errors.As(err, &op) && op.Op == "dial" {
			q.outcome = refused
		}
		return
	}
	q.said = fmt.Sprint(answer.Status, " ", strings.TrimSpace(string(body)))
	switch q.outcome = answer.Header.Get("Tenure-Request"); q.outcome {
	case refused, unknown:
	default:
		q.outcome = answered
		q.token, _ = strconv.ParseInt(answer.Header.Get("Tenure-Token"), 10, 64)
		if answer.StatusCode == http.StatusOK {
			q.number, _ = strconv.Atoi(string(body))
		}
	}
}

const peersFault = "peers " // prefix of the names of the faults between replicas

// kinds are the faults of the connections from replica to replica.
func (d *doors) kinds() []faultKind {
	if d == nil {
		return nil
	}
	toPeer := func(p *process) *rig.Proxy { return d.peers[p.name()] }
	return []faultKind{
		{name: peersFault + "cut", group: "peers", weight: 4, begin: weather(toPeer, cut)},
		{name: peersFault + "slow", group: "peers", weight: 4, begin: weather(toPeer, slow)},
		{name: peersFault + "hang", group: "peers", weight: 4, begin: weather(toPeer, hang)},
		{name: peersFault + "lose answers", group: "peers", weight: 4, begin: weather(toPeer, func(p *phase, w *rig.Weather) {
			chance := p.rand.Float64()
			w.Lose = func([]byte) bool { return rand.Float64() < chance }
		})},
		{name: peersFault + "refused", group: "peers", weight: 4, begin: d.refuse},
	}
}

// refuse lets nothing listen at the addresses of some replicas for a while.
func (d *doors) refuse(_ context.Context, p *phase) (string, ending, error) {
	victims := p.victims(1 + p.rand.IntN(replicas))
	for _, v := range victims {
		d.peers[v.name()].Shut()
		d.peers[v.name()].Cut()
	}
	return names(victims), func() (time.Duration, error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, v := range victims {
			if d.addrs[v.name()] != "" {
				if err := d.peers[v.name()].Open(); err != nil {
					return 0, err
				}
			}
		}
		return 0, nil
	}, nil
}
