package kubetenure

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
)

// client sends requests for the Leases of a namespace. It is safe for concurrent use.
type client struct {
	http  *http.Client
	url   string // of the API server
	path  string // of the namespace's Leases
	token *token // nil: the http.Client has the credentials

	mu     sync.Mutex
	left   time.Time // when leave last ran
	closed bool
	leaves sync.WaitGroup // the goroutines of leave
}

// serviceAccount is the directory with a pod's namespace and credentials.
var serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"

// newClient returns a client, and fills in the config's defaults from the pod's environment.
func newClient(cfg *Config) (*client, error) {
	c := &client{http: cfg.Client, url: strings.TrimSuffix(cfg.URL, "/")}
	if cfg.Namespace == "" {
		text, err := os.ReadFile(filepath.Join(serviceAccount, "namespace"))
		if err != nil {
			return nil, fmt.Errorf("%w: Namespace is empty, and this is not a pod with a service account: %w", tenure.ErrInvalid, err)
		}
		cfg.Namespace = strings.TrimSpace(string(text))
	}
	if !label.MatchString(cfg.Namespace) {
		return nil, fmt.Errorf("%w: %q is not a valid name of a namespace", tenure.ErrInvalid, cfg.Namespace)
	}
	if c.url == "" {
		host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
		if host == "" || port == "" {
			return nil, fmt.Errorf("%w: URL is empty, and KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set as in a pod", tenure.ErrInvalid)
		}
		c.url = "https://" + net.JoinHostPort(host, port)
		if c.http == nil {
			c.token = &token{path: filepath.Join(serviceAccount, "token")}
		}
	}
	if u, err := url.Parse(c.url); err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil || u.RawQuery != "" {
		return nil, fmt.Errorf("%w: URL is not https://HOST:PORT; credentials come from Client", tenure.ErrInvalid)
	}
	if c.http == nil {
		c.http = &http.Client{Transport: transport(c.token != nil)}
	}
	c.path = "/apis/" + apiVersion + "/namespaces/" + cfg.Namespace + "/leases"
	return c, nil
}

// transport returns a transport that detects a dead connection soon, as all requests share one. In a
// pod, each new connection reads the certificate authority again, because it may change.
func transport(inPod bool) *http.Transport {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.ForceAttemptHTTP2 = true
	t.HTTP2 = &http.HTTP2Config{SendPingTimeout: 5 * time.Second, PingTimeout: 3 * time.Second}
	if !inPod {
		return t
	}
	t.Proxy = nil
	t.DialTLSContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		// The context of a dial outlives that of its request, and nothing else limits this handshake.
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		text, err := os.ReadFile(filepath.Join(serviceAccount, "ca.crt"))
		if err != nil {
			return nil, err
		}
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(text)
		dialer := tls.Dialer{Config: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"}}}
		return dialer.DialContext(ctx, network, address)
	}
	return t
}

// token is a bearer token in a file that the kubelet replaces before the token expires.
type token struct {
	path string

	mu   sync.Mutex
	text string
	read time.Time
}

// get returns the token. It reads the file again once a minute, and at once if the API server has
// refused the current token. If the file cannot be read, it returns the current token unless that was
// refused.
func (t *token) get(refused string) (string, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.text == "" || t.text == refused || time.Since(t.read) > time.Minute {
		text, err := os.ReadFile(t.path)
		if err != nil && (t.text == "" || t.text == refused) {
			return "", err
		}
		if err != nil {
			return t.text, nil
		}
		t.text, t.read = strings.TrimSpace(string(text)), time.Now()
	}
	return t.text, nil
}

// status is an answer of the API server that reports a failure.
type status struct {
	Kind    string `json:"kind"`
	Message string `json:"message"`
	Reason  string `json:"reason"`
	Code    int    `json:"code"`
	Details struct {
		Kind string `json:"kind"`
	} `json:"details"`

	retryAfter time.Duration
}

func (s *status) Error() string {
	return strings.TrimSpace(fmt.Sprintf("%d %s: %s", s.Code, cmp.Or(s.Reason, http.StatusText(s.Code)), s.Message))
}

// is reports whether err is an answer with one of the codes.
func is(err error, codes ...int) bool {
	var s *status
	if errors.As(err, &s) {
		for _, code := range codes {
			if s.Code == code {
				return true
			}
		}
	}
	return false
}

// send sends a request for one Lease, or for all if name is empty, and decodes the answer. While the
// API server has too many requests, it waits and retries.
func (c *client) send(ctx context.Context, method, name string, query url.Values, in *lease, out any) error {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return err
		}
	}
	refused := ""
	for {
		sent, resp, err := c.once(ctx, method, name, query, body, refused)
		if err == nil {
			err = json.NewDecoder(resp.Body).Decode(out)
			resp.Body.Close()
			if err != nil && ctx.Err() == nil {
				err = fmt.Errorf("the answer of %s is not that of a Kubernetes API: %w", c.url, err)
			}
		}
		switch {
		case is(err, http.StatusUnauthorized) && c.token != nil && refused == "":
			refused = sent
			continue
		case is(err, http.StatusTooManyRequests): // it was not executed
			var s *status
			errors.As(err, &s)
			wait := time.NewTimer(s.retryAfter + rand.N(s.retryAfter/2+50*time.Millisecond))
			select {
			case <-wait.C:
				continue
			case <-ctx.Done():
				wait.Stop()
				return fmt.Errorf("%w: %w", ctx.Err(), err)
			}
		}
		return explained(err)
	}
}

// once sends a request once, and returns an answer that is not a success as an error. It also returns
// the token that it has sent.
func (c *client) once(ctx context.Context, method, name string, query url.Values, body []byte, refused string) (sent string, resp *http.Response, err error) {
	to := c.url + c.path
	if name != "" {
		to += "/" + name
	}
	if len(query) > 0 {
		to += "?" + query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, method, to, bytes.NewReader(body))
	if err != nil {
		return "", nil, err
	}
	req.Header.Set("Accept", "application/json")
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.token != nil {
		if sent, err = c.token.get(refused); err != nil {
			return "", nil, err
		}
		req.Header.Set("Authorization", "Bearer "+sent)
	}
	resp, err = c.http.Do(req)
	if err != nil {
		if !errors.Is(ctx.Err(), context.Canceled) {
			c.leave()
		}
		return sent, nil, withoutURL(err)
	}
	if resp.StatusCode/100 == 2 {
		return sent, resp, nil
	}
	defer resp.Body.Close()
	s := &status{}
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
	if json.Unmarshal(text, s) != nil || s.Kind != "Status" {
		*s = status{Message: strings.TrimSpace(string(text[:min(len(text), 200)]))}
	}
	s.Code = resp.StatusCode
	if after, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && after > 0 {
		s.retryAfter = time.Duration(after) * time.Second
	}
	if s.Code >= 500 {
		c.leave()
	}
	return sent, nil, s
}

// withoutURL removes the method and URL from an error, as its callers name the operation.
func withoutURL(err error) error {
	var of *url.Error
	if errors.As(err, &of) {
		return of.Err
	}
	return err
}

// leave makes later requests use another connection, perhaps to another API server, because the
// current one does not answer or lags behind. It sends a request that closes its connection, and
// ignores the answer.
func (c *client) leave() {
	const least, longest = time.Second, time.Second
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || time.Since(c.left) < least {
		return
	}
	c.left = time.Now()
	c.leaves.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), longest)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url+"/version", nil)
		if err != nil {
			return
		}
		req.Close = true
		if resp, err := c.http.Do(req); err == nil {
			resp.Body.Close()
		}
	})
}

// close makes leave do nothing, and waits for requests that it has started.
func (c *client) close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.leaves.Wait()
}

// explained adds the remedy to an error of the API server.
func explained(err error) error {
	var s *status
	if !errors.As(err, &s) {
		return err
	}
	switch {
	case s.Code == http.StatusUnauthorized:
		return fmt.Errorf("%w: the API server does not know these credentials: the token has expired, or its service account was deleted (%w)", tenure.ErrSetup, err)
	case s.Code == http.StatusForbidden:
		return fmt.Errorf("%w: the client needs a Role with the verbs get, list, watch, create and update for leases of the group coordination.k8s.io (%w)", tenure.ErrSetup, err)
	case s.Code == http.StatusNotFound && s.Details.Kind == "namespaces":
		return fmt.Errorf("%w: create the namespace first (%w)", tenure.ErrSetup, err)
	case s.Code == http.StatusNotFound && s.Details.Kind != "leases":
		return fmt.Errorf("%w: the URL is not that of a Kubernetes API (%w)", tenure.ErrSetup, err)
	case s.Code == http.StatusBadRequest, s.Code == http.StatusRequestEntityTooLarge, s.Code == http.StatusUnprocessableEntity:
		return fmt.Errorf("%w (%w)", tenure.ErrInvalid, err)
	}
	return err
}
