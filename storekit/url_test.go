package storekit_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

func parse(text string) (storekit.URL, error) {
	return storekit.ParseURL(text, []string{"nats", "tls"}, []string{"stream", "ca", "cert", "key"})
}

func TestAURLHasUserHostsPathAndParameters(t *testing.T) {
	u, err := parse("nats://app:s%40cret@a:4222,b.example,[::1]:1/apps/my%20web/?stream=A%26B&ca=/x")
	require.NoError(t, err)
	password, _ := u.User.Password()
	require.Equal(t, []string{"app", "s@cret"}, []string{u.User.Username(), password})
	require.Equal(t, []string{"a:4222", "b.example", "[::1]:1"}, u.Hosts)
	require.Equal(t, "nats apps/my web", u.Scheme+" "+u.Path)
	require.Equal(t, map[string]string{"stream": "A&B", "ca": "/x"}, u.Parameters)

	u, err = parse("tls://h")
	require.NoError(t, err)
	require.Nil(t, u.User)
	require.Equal(t, storekit.URL{Scheme: "tls", Hosts: []string{"h"}, Parameters: map[string]string{}}, u)
}

func TestAMistypedURLIsRefusedAndNotQuoted(t *testing.T) {
	for url, want := range map[string]string{
		"":                                   "nats:// or tls://",
		"nats:/app:s3cret@h":                 "nats:// or tls://",
		"NATS://app:s3cret@h":                "nats:// or tls://",
		"app:s3cret@h":                       "nats:// or tls://",
		"nats://":                            "user:password@host:port",
		"nats://app:s3cret@h:port":           "%XX",
		"nats://app:s3cret@h,":               "after a comma",
		"nats://app:s3cret/@h":               "%XX",
		"nats://app:s3/cret@h":               "%XX",
		"nats://app:1/s3cret@h":              "%XX",
		"nats://app:s3cret%@h":               "%XX",
		"nats://app:s3cret@x@h":              "%XX",
		"nats://app:1?s3cret@h":              "an @ after the host",
		"nats://app:s3cret@h1,app:s3cret@h2": "%XX",
		"nats://app:s3cret":                  "%XX",
		"nats://h/s3cret%":                   "path that cannot be parsed",
		"nats://h/#s3cret":                   "path that cannot be parsed",
		"nats://h/?stream=s3cret%":           "parameters that cannot be parsed",
		"nats://h/?bucket=b":                 `a parameter "bucket"; nats: URLs have stream, ca, cert, key`,
		"nats://h/?stream=a&stream=b":        "stream twice",
		"nats://h/?stream=":                  `no value for "stream"`,
	} {
		_, err := parse(url)
		require.ErrorIs(t, err, tenure.ErrInvalid, url)
		require.ErrorContains(t, err, want, url)
		require.NotContains(t, err.Error(), "s3cret", url)
	}
}

func TestFilesOfAURLThatDoNotFitAreNamed(t *testing.T) {
	none, err := parse("nats://h")
	require.NoError(t, err)
	cfg, err := none.TLS()
	require.NoError(t, err)
	require.Nil(t, cfg)

	empty := filepath.Join(t.TempDir(), "empty")
	require.NoError(t, os.WriteFile(empty, nil, 0o600))
	for parameters, want := range map[string]string{
		"ca=/missing":                     "ca of the URL: open /missing: no such file",
		"ca=" + empty:                     empty + " has no certificate",
		"cert=" + empty:                   "needs key",
		"key=" + empty:                    "needs cert",
		"cert=" + empty + "&key=" + empty: "cert and key of the URL: tls: failed to find any PEM data",
		"cert=/missing&key=" + empty:      "open /missing: no such file",
	} {
		u, err := parse("nats://h/?" + parameters)
		require.NoError(t, err)
		_, err = u.TLS()
		require.ErrorIs(t, err, tenure.ErrInvalid, parameters)
		require.ErrorContains(t, err, want, parameters)
	}
}

func TestFilesOfAURLAreFoundAfterAChangeOfTheWorkingDirectory(t *testing.T) {
	t.Chdir(t.TempDir())
	secret, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1)}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, &secret.PublicKey, secret)
	require.NoError(t, err)
	key, err := x509.MarshalPKCS8PrivateKey(secret)
	require.NoError(t, err)
	for name, block := range map[string]*pem.Block{"cert.pem": {Type: "CERTIFICATE", Bytes: certificate}, "key.pem": {Type: "PRIVATE KEY", Bytes: key}} {
		require.NoError(t, os.WriteFile(name, pem.EncodeToMemory(block), 0o600))
	}
	u, err := parse("nats://h/?cert=cert.pem&key=key.pem")
	require.NoError(t, err)
	cfg, err := u.TLS()
	require.NoError(t, err)

	t.Chdir(t.TempDir())
	got, err := cfg.GetClientCertificate(nil)
	require.NoError(t, err)
	require.Equal(t, certificate, got.Certificate[0])
}
