package testkit

import (
	"fmt"
	"iter"
	"strings"
)

// secret is the password of each of the URLs.
const secret = "sEcrEt"

// ShowsPassword reports whether a text contains the password of [MistypedURLs].
func ShowsPassword(text string) bool { return strings.Contains(text, secret) }

// urls are correct URLs of all kinds, with the password in each place where it may be.
var urls = []string{
	"postgres://user:sEcrEt@127.0.0.1:1/db?sslmode=disable", "postgresql://127.0.0.1:1/db?user=u&password=sEcrEt&connect_timeout=1",
	"postgres://u@127.0.0.1:1/db?sslpassword=sEcrEt&password=sEcrEt", "nats://user:sEcrEt@127.0.0.1:1/?stream=S", "nats://sEcrEt@127.0.0.1:1",
	"tls://sEcrEt@127.0.0.1:1", "etcd://user:sEcrEt@127.0.0.1:1/prefix", "etcds://user:sEcrEt@127.0.0.1:1",
	"host=127.0.0.1 port=1 user=u password=sEcrEt dbname=d", "host=127.0.0.1 port=1 dbname=d user=u sslpassword='sEcrEt' password = sEcrEt",
}

// without lists mistakes that are more than one character away from a correct URL.
var without = []string{
	"user:sEcrEt@h/db", "//user:sEcrEt@h/db", "h/db?user=u&pass=sEcrEt", "h/db?user=u&password=sEcrEt", "/h/db?user=u&password=sEcrEt", "postgres.//user:sEcrEt@h/db",
	"sqlite:postgres//user:sEcrEt@h/db", "sqlite:///user:sEcrEt@h/db", "sqlite:h/db?user=u&pass=sEcrEt", "sqlite:/x/u:sEcrEt%40h/db", "file:u:sEcrEt@h/db", "sEcrEt@h",
	"jdbc:postgresql://h/db?user=u&password=sEcrEt", "mysql://user:sEcrEt@h/db", "user:sEcrEt@tcp(h:1)/db", "redis:user:sEcrEt@h",
}

// MistypedURLs yields URLs of all kinds with one mistake each: a character that is missing,
// doubled, swapped with the next one, written as %XX, or superfluous. All contain a password. It
// leaves out a token that has become a host name, and a password that has become the end of a user
// name, because no program can detect these.
func MistypedURLs() iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, url := range without {
			if !yield(url) {
				return
			}
		}
		for _, url := range urls {
			for i := range len(url) + 1 {
				for _, mistyped := range mistakes(url, i) {
					if !strings.Contains(mistyped, secret) || strings.Contains(mistyped, "://"+secret+"1") || strings.Contains(mistyped, "user"+secret) {
						continue
					}
					if !yield(mistyped) {
						return
					}
				}
			}
		}
	}
}

// mistakes returns a URL with each mistake at one place.
func mistakes(url string, i int) (all []string) {
	for _, more := range []string{"x", " ", "/", ":", "@", "?", "&", "=", "#", "%", "'", `\`, "\n", ","} {
		all = append(all, url[:i]+more+url[i:])
	}
	if i < len(url) {
		all = append(all, url[:i]+url[i+1:], url[:i+1]+url[i:], fmt.Sprintf("%s%%%02X%s", url[:i], url[i], url[i+1:]))
	}
	if i+1 < len(url) {
		all = append(all, url[:i]+url[i+1:i+2]+url[i:i+1]+url[i+2:])
	}
	return all
}
